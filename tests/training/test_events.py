import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.errors import CheckpointError
from nexttransformer.training.events import EventKey, EventWriter, read_events
from nexttransformer.training.metrics import MetricsLine, MetricsWriter, read_metrics


def metrics_line(attempt: int, update: int) -> MetricsLine:
    return MetricsLine(
        attempt=attempt,
        update=update,
        loss_nats=6.25,
        gradient_norm=1.5,
        learning_rates=[0.1, 0.30000000000000004],
        muon_momentum=0.85,
        muon_weight_decay=0.1,
        rows=8,
        tokens=1024,
        tokens_seen=1024 * update,
        rows_hash="41b8a06bbe3c41f9",
        data_chain="0510cd6f18efa155",
        seconds=0.5,
        tokens_per_second=2048.0,
        mfu_fraction=None,
        peak_memory_bytes=None,
    )


def write_attempt(path: Path, attempt: int) -> None:
    writer = EventWriter(path, attempt)
    writer.write(EventKey.ATTEMPT_START, attempt, {"hosts": ["é"]}, update=0)
    writer.write(EventKey.SPIKE, "loss", {"loss_nats": 7.5}, update=3)
    writer.close()


def test_lines_are_numbered_and_chained(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_attempt(path, 0)
    write_attempt(path, 1)
    lines = path.read_bytes().splitlines()
    values = [json.loads(line) for line in lines]
    assert [value["seq"] for value in values] == [0, 1, 2, 3]
    assert [value["attempt"] for value in values] == [0, 0, 1, 1]
    expected = ["", *(hashlib.sha256(line).hexdigest()[:16] for line in lines[:-1])]
    assert [value["prev"] for value in values] == expected
    assert set(values[0]) == {"seq", "time", "attempt", "update", "key", "value", "meta", "prev"}
    log = read_events(path)
    assert log.problems == log.chain_problems == [] and log.next_attempt == 2
    last = log.last(EventKey.SPIKE)
    assert last is not None and last.seq == 3


def test_missing_and_empty_files_are_empty_logs(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl").next_attempt == 0
    (tmp_path / "events.jsonl").touch()
    assert read_events(tmp_path / "events.jsonl").events == []
    assert read_metrics(tmp_path / "metrics.jsonl").records == []


@pytest.mark.parametrize("cut_bytes", [1, 2, 40, 10_000])
def test_a_torn_last_line_is_closed_and_the_chain_goes_on(tmp_path: Path, cut_bytes: int) -> None:
    """F22: a cut in the last line, also by the newline alone and by nearly all of it."""
    path = tmp_path / "events.jsonl"
    write_attempt(path, 0)
    content = path.read_bytes()
    last = content.splitlines()[-1]
    keep = len(content) - min(cut_bytes, len(last))
    path.write_bytes(content[:keep])
    write_attempt(path, 1)
    assert path.read_bytes()[:keep] == content[:keep]
    log = read_events(path)
    assert log.problems == log.chain_problems == []
    # Without its newline alone, the line is whole.
    is_whole = cut_bytes == 1
    assert log.torn_lines == ([] if is_whole else [2])
    assert [event.seq for event in log.events] == list(range(4 if is_whole else 3))
    assert log.next_attempt == 2


def test_a_torn_line_inside_an_attempt_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_attempt(path, 0)
    writer = EventWriter(path, 0)
    writer.write(EventKey.SPIKE, "loss", update=4)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], lines[1][:30], lines[2]]) + b"\n")
    log = read_events(path)
    assert [number for number, _ in log.problems] == [2] and log.torn_lines == []
    assert [number for number, _ in log.chain_problems] == [3, 3]
    with pytest.raises(CheckpointError, match=r"damaged or edited.*events\.jsonl:2"):
        EventWriter(path, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "spikes"}, "unknown event key. Did you mean 'spike'"),
        ({"note": "x"}, "unknown key 'note'"),
        ({"update": "3"}, "update: Input should be a valid integer"),
        ({"update": -1}, "greater than or equal to 0"),
        ({"time": "today"}, "time"),
    ],
)
def test_illegal_lines_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "events.jsonl"
    write_attempt(path, 0)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps({**json.loads(second), **changes})}\n")
    ((line, text),) = read_events(path).problems
    assert line == 2 and message in text


def test_an_edited_event_breaks_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_attempt(path, 0)
    path.write_text(path.read_text().replace('"update":0', '"update":1', 1))
    ((line, message),) = read_events(path).chain_problems
    assert line == 2 and "prev" in message


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_reading_never_raises_for_content(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("logs") / "events.jsonl"
    path.write_bytes(content)
    log = read_events(path)
    assert log.events == [] and len(log.torn_lines) + len(log.problems) >= (content.strip(b"\n") != b"")
    read_metrics(path)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert read_events(tmp_path).problems == [(0, f"{tmp_path.name}: cannot be read: Is a directory.")]


def test_metrics_are_appended_and_never_rewritten(tmp_path: Path) -> None:
    """F22: a torn last line stays as it is; the next attempt repeats the update on a new line."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for update in (1, 2, 3):
        writer.write(metrics_line(0, update))
    writer.close()
    before = path.read_bytes()[:-20]
    path.write_bytes(before)
    writer = MetricsWriter(path)
    writer.write(metrics_line(1, 3))
    writer.sync()
    assert path.read_bytes().startswith(before + b"\n")
    log = read_metrics(path)
    assert [(line.attempt, line.update) for line in log.records] == [(0, 1), (0, 2), (1, 3)]
    assert (log.lines, log.torn_lines, log.problems) == ([1, 2, 4], [3], [])
    assert log.records[0] == metrics_line(0, 1)
    # Floats come back to the last bit.
    assert json.loads(path.read_text().splitlines()[0])["learning_rates"] == [0.1, 0.30000000000000004]


def test_every_line_is_visible_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(metrics_line(0, 1))
    assert len(read_metrics(tmp_path / "metrics.jsonl").records) == 1
    writer.close()


def test_non_finite_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        MetricsLine(**{**metrics_line(0, 1).model_dump(), "loss_nats": float("nan")})


_LIMITED = """
import resource, sys
from pathlib import Path
from nexttransformer.errors import RunFailure
from nexttransformer.training.events import EventKey, EventWriter
writer = EventWriter(Path(sys.argv[1]), 0)
writer.write(EventKey.ATTEMPT_START, 0, update=0)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
try:
    writer.write(EventKey.SPIKE, "loss", {"loss_nats": 7.5}, update=1)
except RunFailure as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
writer.write(EventKey.ATTEMPT_END, "failed", update=1)
"""


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    """F12: for log lines."""
    path = tmp_path / "events.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "a line cannot be written: File too large" in result.stdout and str(path) in result.stdout
    log = read_events(path)
    assert [event.key for event in log.events] == ["attempt_start", "attempt_end"]
    assert log.problems == log.chain_problems == [] and log.torn_lines == []
