"""The effective timeline by hand: which attempt's line of an update counts."""

from pathlib import Path

import pytest

from nexttransformer.reporting.run_view import read_run
from nexttransformer.reporting.timeline import Timeline
from tests.reporting.synthetic import Launch, write_run


def timeline(folder: Path, *launches: Launch, status: str = "finished") -> Timeline:
    return read_run(write_run(folder / "run", list(launches), status=status), "run").timeline


def attempts_of(found: Timeline) -> dict[int, int]:
    return {line.update: line.attempt for line in found.effective}


def test_repeated_updates_count_once_and_for_the_last_attempt(tmp_path: Path):
    found = timeline(tmp_path, Launch(0, 8, "killed"), Launch(5, 12, "killed"), Launch(10, 20, "finished"))
    expected = {**dict.fromkeys(range(1, 6), 0), **dict.fromkeys(range(6, 11), 1), **dict.fromkeys(range(11, 21), 2)}
    assert attempts_of(found) == expected
    assert [(line.attempt, line.update) for line in found.superseded] == [(0, 6), (0, 7), (0, 8), (1, 11), (1, 12)]


def test_while_running_updates_beyond_the_newest_attempt_are_superseded(tmp_path: Path):
    found = timeline(tmp_path, Launch(0, 9, "killed"), Launch(5, 7, "killed"), status="running")
    assert found.last_update == 7
    assert attempts_of(found) == {**dict.fromkeys(range(1, 6), 0), 6: 1, 7: 1}
    assert [line.update for line in found.superseded] == [6, 7, 8, 9]


def test_an_attempt_without_lines_takes_the_run_back_to_its_start(tmp_path: Path):
    found = timeline(tmp_path, Launch(0, 9, "killed"), Launch(5, 5, "killed"), status="running")
    assert found.last_update == 5
    assert [line.update for line in found.superseded] == [6, 7, 8, 9]


def test_a_lost_attempt_start_is_taken_from_the_metrics(tmp_path: Path):
    root = write_run(tmp_path / "run", [Launch(0, 8, "killed"), Launch(5, 20, "finished")])
    (root / "events.jsonl").unlink()
    view = read_run(root, "run")
    assert attempts_of(view.timeline) == {**dict.fromkeys(range(1, 6), 0), **dict.fromkeys(range(6, 21), 1)}
    assert "events.jsonl: missing." in view.problems


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_superseded_evaluations_are_left_out(tmp_path: Path, status: str):
    root = write_run(tmp_path / "run", [Launch(0, 10, "killed"), Launch(5, 8, "killed")], status=status)
    view = read_run(root, "run")
    # The value at 10 belongs to updates that will be repeated.
    assert [update for update, _ in view.bpb_curve] == [0, 5]
    assert view.num_superseded_evaluations == 1
