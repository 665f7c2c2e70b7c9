"""Strict JSON: canonical bytes, digests, atomic writing, reading that refuses what JSON forbids."""

import hashlib
import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from nexttransformer.errors import ConfigError, NextTransformerError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def canonical_bytes(value: Any) -> bytes:
    """Returns the one byte form of a JSON value: sorted keys, no spaces, UTF-8, shortest floats.

    Raises:
        ValueError: if the value holds NaN or Infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def digest(value: Any) -> str:
    """Returns the SHA-256 (64 hex digits) of a JSON value's canonical bytes."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 (64 hex digits) of a file's bytes."""
    # hashlib.file_digest exists from Python 3.11 on.
    result = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Makes renames and removals inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Writes a file so that it appears complete or not at all (temporary name, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def pretty_bytes(value: Any) -> bytes:
    """Returns the form in which JSON files are written: sorted keys, indented, newline-terminated, UTF-8."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes a JSON value, indented, sorted and newline-terminated, atomically."""
    write_bytes_atomic(path, pretty_bytes(value))


def parse_json(content: bytes, where: str, error: type[NextTransformerError] = ConfigError) -> Any:
    """Parses JSON, refusing bad UTF-8, duplicate keys, NaN, Infinity, numbers beyond a float and half characters.

    Args:
        content: raw bytes.
        where: the file name used in messages.
        error: class to raise.
    """

    def reject_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(text: str) -> float:
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"the number {text[:40]} is too large")
        return number

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ValueError(f"duplicate key '{min(key for key in counts if counts[key] > 1)}'")
        return value

    try:
        value = json.loads(
            content.decode("utf-8"),
            parse_constant=reject_constant,
            parse_float=finite,
            object_pairs_hook=reject_duplicates,
        )
        if _SURROGATE.search(content):
            canonical_bytes(value)  # an escaped half of a character, such as "\\ud800" alone, is no text
        return value
    except UnicodeEncodeError:
        raise error(
            f"{where}: not valid JSON: a \\ud... escape without its other half. Write the character out."
        ) from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: not valid JSON: {problem}.") from None


def read_json(path: Path, error: type[NextTransformerError] = ConfigError) -> Any:
    """Reads a strict JSON file; a missing or unreadable file raises `error` with its name."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}.") from None
    return parse_json(content, str(path), error)
