"""`metrics.jsonl`: one line per update, never rewritten; this local file is the truth."""

from dataclasses import dataclass
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError
from nexttransformer.training.line_log import LineFile, read_lines
from nexttransformer.training.strict_record import Count, Hex16, StrictRecord


class MetricsLine(StrictRecord):
    """One update. `mfu_fraction` and `peak_memory_bytes` are None where the device has no such number."""

    attempt: Count
    update: Count
    loss_nats: float
    gradient_norm: float
    learning_rates: list[float]
    muon_momentum: float
    muon_weight_decay: float
    rows: Count
    tokens: Count
    tokens_seen: Count
    rows_hash: Hex16
    data_chain: Hex16
    seconds: float
    tokens_per_second: float
    mfu_fraction: float | None
    peak_memory_bytes: Count | None


@dataclass(frozen=True)
class MetricsLog:
    """What a file holds; fields as in `events.EventLog`. An update may be there twice after a resume."""

    records: list[MetricsLine]
    lines: list[int]
    torn_lines: list[int]
    problems: list[tuple[int, str]]


def read_metrics(path: Path) -> MetricsLog:
    """Reads a metrics file without ever raising for its content; a missing file is empty."""
    read = read_lines(path, MetricsLine, lambda line, before: before is None or line.attempt > before.attempt)
    return MetricsLog(read.records, read.numbers, read.torn, read.problems)


class MetricsWriter:
    """Appends lines, each flushed; `sync` (at saves) makes them durable. A torn last line is closed on opening."""

    def __init__(self, path: Path) -> None:
        """Opens for append; CheckpointError if the file was edited, RunFailure if it cannot be opened."""
        problems = read_metrics(path).problems
        if problems:
            raise CheckpointError(f"{path}: damaged or edited, the run cannot go on with it: {problems[0][1]}")
        self._file = LineFile(path)

    def write(self, line: MetricsLine) -> None:
        """Appends a line; RunFailure if it cannot be written (the half-written line is taken back)."""
        self._file.append(jsonio.canonical_bytes(line.to_json()))

    def sync(self) -> None:
        """Makes everything written durable; RunFailure if that fails."""
        self._file.sync()

    def close(self) -> None:
        """Syncs and closes."""
        self._file.sync()
        self._file.close()
