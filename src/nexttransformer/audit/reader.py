"""The one reader of hostile input: regular files only, capped in size, strict UTF-8 and JSON, nothing believed."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 16 * 2**20
MAX_LINE_BYTES = 64 * 2**10
MAX_LOG_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
MAX_DEPTH = 32
_HASH_BLOCK_BYTES = 2**22
_MAX_INTEGER_CHARACTERS = 20
_SURROGATE = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Malformed(Exception):
    """Content that cannot be used; the text says what is wrong, without the file's name."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; never follows a link and never waits for a pipe or device.

    Raises:
        Malformed: if it is no regular file or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise Malformed(f"cannot be opened: {os.strerror(problem.errno or 0)}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Malformed("is no regular file.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns a file's content; Malformed if it is longer than `limit` bytes or cannot be read."""
    with open_regular(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as problem:
            raise Malformed(f"cannot be read: {os.strerror(problem.errno or 0)}.") from None
    if len(content) > limit:
        raise Malformed(f"is longer than {limit:,} bytes.")
    return content


def hash_file(path: Path) -> tuple[int, str]:
    """Returns size and SHA-256 of a regular file of any size; Malformed if it cannot be read."""
    result, num_bytes = hashlib.sha256(), 0
    with open_regular(path) as file:
        try:
            while block := file.read(_HASH_BLOCK_BYTES):
                result.update(block)
                num_bytes += len(block)
        except OSError as problem:
            raise Malformed(f"cannot be read: {os.strerror(problem.errno or 0)}.") from None
    return num_bytes, result.hexdigest()


def parse_json(content: bytes) -> Any:
    """Parses strict JSON: UTF-8, at most 32 levels, finite floats, 64-bit integers, no duplicate keys.

    Raises:
        Malformed: saying what is wrong.
    """
    try:
        text = content.decode("utf-8")
        value = (_STRICT if _RISKY.search(text) else _FAST).decode(text)
    except RecursionError:
        raise Malformed(f"has more than {MAX_DEPTH} levels.") from None
    except ValueError as problem:
        raise Malformed(f"is not valid JSON: {' '.join(str(problem).split())}.") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Malformed(f"has more than {MAX_DEPTH} levels.")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise Malformed("is not valid JSON: half of a surrogate pair.") from None
    return value


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= _MAX_INTEGER_CHARACTERS else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{text[:30]} does not fit into 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:30]} is not finite")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {json.dumps(doubled)}")
    return value


# Only numbers with many digits or a large exponent can leave the range of 64 bits or of floats; all others are
# left to the decoder's own conversion, which is much faster.
_RISKY = re.compile(r"(?:^|[:\[,])\s*-?(?:\d{19}|\d[\d.]*[eE]\+?\d{3})")
_FAST = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_object)
_STRICT = json.JSONDecoder(
    parse_constant=_reject_constant, parse_int=_integer, parse_float=_float, object_pairs_hook=_object
)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yields (line number from 1, line without its newline or None if it is too long, ends with a newline).

    Raises:
        Malformed: the file cannot be read or is longer than a log may be.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_LOG_BYTES:
            raise Malformed(f"is longer than {MAX_LOG_BYTES:,} bytes.")
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            is_ended = line.endswith(b"\n")
            if not is_ended and len(line) > MAX_LINE_BYTES:
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, None, True
            else:
                yield number, line[:-1] if is_ended else line, is_ended


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; `start` and `end` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a safetensors file says of itself."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Reads and checks a header: entries of the right form whose offsets fill the file without gap or overlap.

    Raises:
        Malformed: saying what is wrong.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8).ljust(8, b"\xff"), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise Malformed("has a header that is longer than the file or the limit.")
        content = file.read(length)
    value = parse_json(content)
    if not isinstance(value, dict):
        raise Malformed("has a header that is no JSON object.")
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise Malformed("has header metadata that are no strings.")
    tensors = {name: _tensor_entry(name, entry, 8 + length) for name, entry in value.items()}
    position = 8 + length
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise Malformed(f"has a gap or overlap before tensor {json.dumps(name)}.")
        position = entry.end
    if position != size:
        raise Malformed(f"has {size:,} bytes, its header describes {position:,}.")
    return SafetensorsHeader(metadata, tensors)


def _tensor_entry(name: str, entry: Any, data_start: int) -> TensorEntry:
    is_whole = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    if is_whole and entry["dtype"] in DTYPE_BYTES and _is_naturals(entry["shape"]) and len(entry["shape"]) <= MAX_DEPTH:
        offsets = entry["data_offsets"]
        num_bytes = math.prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]]
        if _is_naturals(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == num_bytes:
            return TensorEntry(entry["dtype"], tuple(entry["shape"]), data_start + offsets[0], data_start + offsets[1])
    raise Malformed(f"has a bad header entry {json.dumps(name)}.")


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
