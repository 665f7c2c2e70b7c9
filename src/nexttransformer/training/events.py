"""`events.jsonl`: one enum of keys, one writer (rank 0), one reader for trainer, audit and report."""

import hashlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import field_validator

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, suggest
from nexttransformer.training.line_log import LineFile, read_lines
from nexttransformer.training.strict_record import Count, StrictRecord, Time, utc_now


class EventKey(str, Enum):
    """Everything a run can report."""

    ATTEMPT_START = "attempt_start"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    CHECKPOINT_REMOVED = "checkpoint_removed"
    SAVE_FAILED = "save_failed"
    EVALUATION = "evaluation"
    STOP_REQUESTED = "stop_requested"
    NONFINITE = "nonfinite"
    SPIKE = "spike"
    RECOMPILE = "recompile"
    FALLBACK = "fallback"
    SETTING_IGNORED = "setting_ignored"
    ATTEMPT_END = "attempt_end"
    RUN_END = "run_end"


class Event(StrictRecord):
    """One line. `prev` is the first 16 hex digits of the previous complete line's SHA-256, empty for seq 0."""

    seq: Count
    time: Time
    attempt: Count
    update: Count
    key: str
    value: Any
    meta: dict[str, Any]
    prev: str

    @field_validator("key")
    @classmethod
    def _known_key(cls, key: str) -> str:
        choices = [known.value for known in EventKey]
        if key not in choices:
            raise ValueError(f"unknown event key.{suggest(key, choices)}")
        return key


@dataclass(frozen=True)
class EventLog:
    """What a file holds.

    `lines` are the 1-based line numbers of `events`. `torn_lines` are legal torn lines (the last line
    of an attempt). `problems` are (line, message) of lines that are no event; `chain_problems` those of
    breaks in `seq` and `prev`.
    """

    events: list[Event]
    lines: list[int]
    torn_lines: list[int]
    problems: list[tuple[int, str]]
    chain_problems: list[tuple[int, str]]
    last_hash: str

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt: one more than the last `attempt_start`, 0 without one."""
        start = self.last(EventKey.ATTEMPT_START)
        return 0 if start is None else start.attempt + 1

    def last(self, key: EventKey) -> Event | None:
        """Returns the last event of that key."""
        return next((event for event in reversed(self.events) if event.key == key.value), None)


def line_hash(line: bytes) -> str:
    """Returns what the next line's `prev` must be; `line` without its newline."""
    return hashlib.sha256(line).hexdigest()[:16]


def read_events(path: Path) -> EventLog:
    """Reads a log without ever raising for its content; a missing file is an empty log."""
    read = read_lines(path, Event, lambda event, _: event.key == EventKey.ATTEMPT_START.value)
    chain_problems = []
    expected = ""
    for index, (event, number, line) in enumerate(zip(read.records, read.numbers, read.raw, strict=True)):
        if event.seq != index:
            chain_problems.append((number, f"{path.name}:{number}: seq: expected {index}, got {event.seq}."))
        if event.prev != expected:
            message = f"{path.name}:{number}: prev: expected '{expected}', got '{event.prev}'."
            chain_problems.append((number, message))
        expected = line_hash(line)
    return EventLog(read.records, read.numbers, read.torn, read.problems, chain_problems, expected)


class EventWriter:
    """Appends events, each flushed and fsynced. Opening closes a torn last line and continues seq and prev."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Opens for append.

        Raises:
            CheckpointError: if the file was edited (an illegal line, a break in seq or prev); names the line.
            RunFailure: if it cannot be opened for writing.
        """
        log = read_events(path)
        problems = sorted(log.problems + log.chain_problems)
        if problems:
            raise CheckpointError(f"{path}: damaged or edited, the run cannot go on with it: {problems[0][1]}")
        self._file = LineFile(path)
        self._attempt = attempt
        self._seq = len(log.events)
        self._prev = log.last_hash
        self._time = ""

    def write(self, key: EventKey, value: Any, meta: dict[str, Any] | None = None, *, update: int) -> Event:
        """Appends one event; `update` is the number of completed updates.

        Raises:
            RunFailure: if the line cannot be written; the half-written line is taken back.
        """
        # A clock that is set back must not reorder an attempt.
        self._time = max(self._time, utc_now())
        event = Event(
            seq=self._seq,
            time=self._time,
            attempt=self._attempt,
            update=update,
            key=key.value,
            value=value,
            meta=meta or {},
            prev=self._prev,
        )
        line = jsonio.canonical_bytes(event.to_json())
        self._file.append(line)
        self._file.sync()
        self._seq += 1
        self._prev = line_hash(line)
        return event

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
