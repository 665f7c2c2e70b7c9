"""`events.jsonl` and `metrics.jsonl` as the audit reads them: schema by line, legal torn lines, columns of numbers."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import numpy as np

from nexttransformer.audit import reader
from nexttransformer.audit.event_schema import META_SCHEMAS, Meta
from nexttransformer.training.events import Event, EventKey, line_hash
from nexttransformer.training.line_log import LineType
from nexttransformer.training.metrics import MetricsLine

# After so many bad lines a file is no log, and reading it on would only cost memory.
MAX_BAD_LINES = 1000


@dataclass(frozen=True)
class Line(Generic[LineType]):
    """One line: its record, or what is wrong with it. `is_torn` means unreadable but legal (last of an attempt)."""

    number: int
    raw: bytes
    record: LineType | None
    problems: tuple[str, ...] = ()
    is_torn: bool = False


def read_log(
    path: Path, record_type: type[LineType], starts_attempt: Callable[[LineType, LineType | None], bool]
) -> Iterator[Line[LineType]]:
    """Yields every line of a log.

    A line that is no JSON or has no newline is legal only where an attempt ended: nothing but such lines
    follows before the end of the file or before a line that starts an attempt.

    Args:
        path: the file.
        record_type: schema of a line.
        starts_attempt: says of (record, record before it or None) whether an attempt begins there.

    Raises:
        reader.Malformed: the file as a whole cannot be used.
    """
    before: LineType | None = None
    unparsed: list[tuple[int, str]] = []
    num_bad = 0
    for number, raw, is_ended in reader.read_lines(path):
        try:
            if raw is None:
                raise reader.Malformed(f"is longer than {reader.MAX_LINE_BYTES:,} bytes.")
            if not is_ended:
                raise reader.Malformed("has no newline at its end.")
            value = reader.parse_json(raw)
        except reader.Malformed as problem:
            num_bad += 1
            unparsed.append((number, f"The line {problem}"))
            if num_bad > MAX_BAD_LINES:
                break
            continue
        record, problems = record_type.problems_of(value, "")
        if record is None:
            num_bad += 1
            yield Line(number, raw or b"", None, tuple(text.removeprefix(": ") for text in problems))
            if num_bad > MAX_BAD_LINES:
                break
            continue
        assert isinstance(record, record_type)
        if unparsed:
            is_legal = starts_attempt(record, before)
            yield from _unparsed(unparsed, is_torn=is_legal)
            unparsed = []
        before = record
        yield Line(number, raw or b"", record)
    yield from _unparsed(unparsed, is_torn=num_bad <= MAX_BAD_LINES)
    if num_bad > MAX_BAD_LINES:
        raise reader.Malformed(f"has more than {MAX_BAD_LINES} bad lines; the rest is not read.")


def _unparsed(lines: list[tuple[int, str]], *, is_torn: bool) -> Iterator[Line]:
    for number, problem in lines:
        yield Line(number, b"", None, () if is_torn else (problem,), is_torn)


@dataclass(frozen=True)
class LoggedEvent:
    """An event with its line number, the hash of its line and its checked `meta` (None if that is malformed)."""

    event: Event
    line: int
    hash: str
    meta: Meta | None

    @property
    def where(self) -> str:
        """Place for findings."""
        return f"events.jsonl:{self.line}"


@dataclass
class EventLog:
    """All events in file order. `torn_lines` are legal torn lines; `last_line` counts them too."""

    events: list[LoggedEvent] = field(default_factory=list)
    torn_lines: list[int] = field(default_factory=list)
    last_line: int = 0

    def of(self, key: EventKey) -> list[LoggedEvent]:
        """Returns the events of a key."""
        return [each for each in self.events if each.event.key == key.value]


Report = Callable[[str, str], None]


def read_events(path: Path, report: Report) -> EventLog:
    """Reads `events.jsonl`; problems go to `report(where, message)`. Malformed if the file cannot be used."""
    log = EventLog()
    for line in read_log(path, Event, lambda event, _: event.key == EventKey.ATTEMPT_START.value):
        where = f"{path.name}:{line.number}"
        log.last_line = line.number
        for problem in line.problems:
            report(where, problem)
        if line.is_torn:
            log.torn_lines.append(line.number)
        if line.record is not None:
            schema = META_SCHEMAS[EventKey(line.record.key)]
            meta, problems = schema.problems_of(line.record.meta, "meta")
            for problem in [*problems, *schema.value_problems(line.record.value)]:
                report(where, problem)
            assert meta is None or isinstance(meta, Meta)
            log.events.append(LoggedEvent(line.record, line.number, line_hash(line.raw), meta))
    return log


_INTEGERS = ("attempt", "update", "rows", "tokens", "tokens_seen")
_FLOATS = ("loss_nats", "gradient_norm", "muon_momentum", "muon_weight_decay", "seconds", "tokens_per_second")


class Metrics:
    """`metrics.jsonl` as columns, one entry per legal line in file order.

    Attributes:
        line: line numbers.
        attempt, update, rows, tokens, tokens_seen: int64.
        loss_nats, gradient_norm, muon_momentum, muon_weight_decay, seconds, tokens_per_second: float64.
        mfu_fraction: float64, NaN where the device has none.
        rows_hash, data_chain: uint64.
        learning_rates: one tuple per line.
        num_torn: legal torn lines.
    """

    def __init__(self, path: Path, report: Report) -> None:
        """Reads the file; problems go to `report(where, message)`. Malformed if the file cannot be used."""
        columns: dict[str, array[Any]] = {name: array("q") for name in ("line", *_INTEGERS)}
        columns |= {name: array("d") for name in (*_FLOATS, "mfu_fraction")}
        columns |= {name: array("Q") for name in ("rows_hash", "data_chain")}
        # Groups share their rates for many updates, and equal tuples are kept once.
        known_rates: dict[tuple[float, ...], tuple[float, ...]] = {}
        self.learning_rates: list[tuple[float, ...]] = []
        self.num_torn = 0
        for line in read_log(path, MetricsLine, lambda new, old: old is None or new.attempt > old.attempt):
            for problem in line.problems:
                report(f"{path.name}:{line.number}", problem)
            self.num_torn += line.is_torn
            record = line.record
            if record is None:
                continue
            columns["line"].append(line.number)
            for name in (*_INTEGERS, *_FLOATS):
                columns[name].append(getattr(record, name))
            columns["mfu_fraction"].append(float("nan") if record.mfu_fraction is None else record.mfu_fraction)
            columns["rows_hash"].append(int(record.rows_hash, 16))
            columns["data_chain"].append(int(record.data_chain, 16))
            rates = tuple(record.learning_rates)
            self.learning_rates.append(known_rates.setdefault(rates, rates))
        kinds = {"q": np.int64, "d": np.float64, "Q": np.uint64}
        arrays = {name: np.array(column, dtype=kinds[column.typecode]) for name, column in columns.items()}
        self.line, self.attempt, self.update = arrays["line"], arrays["attempt"], arrays["update"]
        self.rows, self.tokens, self.tokens_seen = arrays["rows"], arrays["tokens"], arrays["tokens_seen"]
        self.loss_nats, self.gradient_norm = arrays["loss_nats"], arrays["gradient_norm"]
        self.muon_momentum, self.muon_weight_decay = arrays["muon_momentum"], arrays["muon_weight_decay"]
        self.seconds, self.tokens_per_second = arrays["seconds"], arrays["tokens_per_second"]
        self.mfu_fraction = arrays["mfu_fraction"]
        self.rows_hash, self.data_chain = arrays["rows_hash"], arrays["data_chain"]

    def __len__(self) -> int:
        return len(self.line)

    def where(self, index: int | np.integer, key: str = "") -> str:
        """Place of a line (by index) for findings."""
        return f"metrics.jsonl:{self.line[index]}{' ' + key if key else ''}"
