"""Append-only files of JSON lines that survive a crash in the middle of a line."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from nexttransformer import jsonio
from nexttransformer.errors import NextTransformerError, RunFailure
from nexttransformer.training.strict_record import StrictRecord

MAX_LINE_BYTES = 65_536

LineType = TypeVar("LineType", bound=StrictRecord)


class LineFile:
    """Appends whole lines to a file. Opening closes a torn last line with a newline."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; RunFailure if that is impossible."""
        self._path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            length_bytes = os.fstat(self._descriptor).st_size
            if length_bytes and os.pread(self._descriptor, 1, length_bytes - 1) != b"\n":
                self._append(b"\n")
        except OSError as problem:
            self.close()
            raise self._failure(problem) from None

    def append(self, line: bytes) -> None:
        """Appends a line (without newline). A half-written one is taken back before RunFailure is raised."""
        assert b"\n" not in line and len(line) < MAX_LINE_BYTES
        try:
            self._append(line + b"\n")
        except OSError as problem:
            raise self._failure(problem) from None

    def sync(self) -> None:
        """Makes all lines durable; RunFailure if that fails."""
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise self._failure(problem) from None

    def close(self) -> None:
        """Closes the file; again is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, content: bytes) -> None:
        start = os.fstat(self._descriptor).st_size
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # Shortening works on a full disk, and leaves nothing torn in the middle of an attempt.
            os.ftruncate(self._descriptor, start)
            raise

    def _failure(self, problem: OSError) -> RunFailure:
        return RunFailure(
            f"{self._path}: a line cannot be written: {problem.strerror}. Metrics and events are evidence, so the run "
            "stops. Free some space or raise the quota, then repeat the command."
        )


@dataclass(frozen=True)
class ReadLines(Generic[LineType]):
    """Lines of a file.

    `numbers` (1-based) and `raw` belong to `records`; `problems` are (line, message), line 0 for the file.
    """

    records: list[LineType]
    numbers: list[int]
    raw: list[bytes]
    torn: list[int]
    problems: list[tuple[int, str]]


def read_lines(
    path: Path, record_type: type[LineType], starts_attempt: Callable[[LineType, LineType | None], bool]
) -> ReadLines[LineType]:
    """Reads every line; never raises for content, and takes a missing file as empty.

    A line that is no JSON is legal (torn) only where an attempt ended: nothing but torn lines follows
    before the end of the file or before a line that starts an attempt.

    Args:
        path: the file.
        record_type: schema of a line.
        starts_attempt: says of (record, record before it or None) whether a new attempt begins there.
    """
    result: ReadLines[LineType] = ReadLines([], [], [], [], [])
    unparsed: list[tuple[int, str]] = []
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as problem:
        result.problems.append((0, f"{path.name}: cannot be read: {problem.strerror}."))
        return result
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            if len(line) >= MAX_LINE_BYTES:
                raise NextTransformerError(f"{path.name}:{number}: the line is longer than {MAX_LINE_BYTES} bytes.")
            value = jsonio.parse_json(line, f"{path.name}:{number}", NextTransformerError)
        except NextTransformerError as problem:
            unparsed.append((number, str(problem)))
            continue
        record, found = record_type.problems_of(value, f"{path.name}:{number}")
        if record is None:
            result.problems.extend((number, message) for message in found)
            continue
        assert isinstance(record, record_type)
        before = result.records[-1] if result.records else None
        if unparsed:
            _sort_unparsed(result, unparsed, is_legal=starts_attempt(record, before))
            unparsed = []
        result.records.append(record)
        result.numbers.append(number)
        result.raw.append(line)
    _sort_unparsed(result, unparsed, is_legal=True)
    result.problems.sort()
    return result


def _sort_unparsed(result: ReadLines[LineType], unparsed: list[tuple[int, str]], *, is_legal: bool) -> None:
    if is_legal:
        result.torn.extend(number for number, _ in unparsed)
    else:
        result.problems.extend(unparsed)
