"""`events.jsonl`: one enum of keys, one writer (rank 0), one reader for trainer, audit and report."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nexttransformer.training.strict_record import Count, StrictRecord, Time


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


@dataclass(frozen=True)
class EventLog:
    """What a file holds.

    `lines` are 1-based line numbers of `events`. `torn_lines` are legal torn lines (the last line of an
    attempt). `problems` are (line, message): illegal lines, seq or prev breaks.
    """

    events: list[Event]
    lines: list[int]
    torn_lines: list[int]
    problems: list[tuple[int, str]]

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt: one more than the last `attempt_start`, 0 without one."""
        raise NotImplementedError

    def last(self, key: EventKey) -> Event | None:
        """Returns the last event of that key."""
        raise NotImplementedError


def read_events(path: Path) -> EventLog:
    """Reads a log without ever raising for its content; a missing file is an empty log."""
    raise NotImplementedError


class EventWriter:
    """Appends events, each flushed and fsynced. Opening closes a torn last line and continues seq and prev."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Opens for append.

        Raises:
            CheckpointError: if the file holds an illegal line (it was edited); names line and reason.
        """
        raise NotImplementedError

    def write(self, key: EventKey, value: Any, meta: dict[str, Any] | None = None, *, update: int) -> Event:
        """Appends one event; `update` is the number of completed updates.

        Raises:
            RunFailure: if the line cannot be written; the half-written line is taken back.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Closes the file."""
        raise NotImplementedError
