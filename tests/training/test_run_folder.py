import json
from pathlib import Path
from typing import Any

import pytest

from nexttransformer.errors import CheckpointError
from nexttransformer.training.events import EventKey, EventWriter
from nexttransformer.training.launch_plan import plan_launch
from nexttransformer.training.run_folder import RunFolder, new_run_id
from nexttransformer.training.run_schema import RunState
from tests.training.run_helpers import RUN_ID, make_record, save, sha


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def started(folder: RunFolder, **changes: Any) -> RunFolder:
    folder.create(make_record(**changes))
    writer = EventWriter(folder.events, 0)
    writer.write(EventKey.ATTEMPT_START, 0, update=0)
    writer.close()
    return folder


def test_paths_are_those_of_the_specification(folder: RunFolder) -> None:
    names = {
        "run.json": folder.run_json,
        "run_state.json": folder.run_state_json,
        "events.jsonl": folder.events,
        "metrics.jsonl": folder.metrics,
        "train.lock": folder.lock,
        "stop_requested": folder.stop_file,
        "logs": folder.logs,
        "evaluations/val_curve_00000625.json": folder.evaluation("val_curve", 625),
        "evaluations/core_00003125.json": folder.evaluation("core", 3125),
        "evaluations/final.json": folder.evaluation("final", 46_875),
        "checkpoint_00046875": folder.checkpoint(46_875),
    }
    assert all(path == folder.root / name for name, path in names.items())


def test_the_record_is_written_once_and_comes_back(folder: RunFolder) -> None:
    assert folder.read_record() is None
    folder.create(make_record())
    assert folder.read_record() == make_record()
    with pytest.raises(CheckpointError, match="written once"):
        folder.create(make_record(run_id=new_run_id()))
    assert json.loads(folder.run_json.read_text())["schema"] == "nexttransformer.run/1"


def test_all_problems_of_a_record_are_listed(folder: RunFolder) -> None:
    folder.create(make_record())
    value = json.loads(folder.run_json.read_text())
    value["seed"] = 42.0
    value["sead"] = 1
    value["data"]["tokenizer"] = "ABC"
    del value["method"]
    value["schema"] = "nexttransformer.run/2"
    folder.run_json.write_text(json.dumps(value))
    with pytest.raises(CheckpointError) as caught:
        folder.read_record()
    lines = str(caught.value).splitlines()
    assert len(lines) == 5 and all(str(folder.run_json) in line for line in lines)
    text = str(caught.value)
    for part in (
        "schema: expected 'nexttransformer.run/1', got 'nexttransformer.run/2'",
        "seed: Input should be a valid integer",
        "unknown key 'sead'. Did you mean 'seed'?",
        "data.tokenizer: String should match pattern",
        "key 'method' is missing",
    ):
        assert part in text


def test_the_state_is_information_only(folder: RunFolder) -> None:
    folder.create(make_record())
    assert folder.read_state() is None
    state = RunState(
        status="stopped",
        update=7,
        attempt=0,
        newest_checkpoint="checkpoint_00000007",
        reason="SIGTERM",
        num_attempts_without_progress=0,
    )
    folder.write_state(state)
    assert folder.read_state() == state
    assert json.loads(folder.run_state_json.read_text())["status"] == "stopped"
    folder.run_state_json.write_text("{")
    assert folder.read_state() is None


def test_an_evaluation_is_due_until_its_file_names_these_weights(folder: RunFolder) -> None:
    """F18, without a trainer."""
    folder.create(make_record())
    path = folder.evaluation("val_curve", 5)
    assert folder.evaluation_is_due("val_curve", 5, sha("weights"))
    for content in ("{", "[]", '{"checkpoint": null}', json.dumps({"checkpoint": {"weights_digest": sha("other")}})):
        path.write_text(content)
        assert folder.evaluation_is_due("val_curve", 5, sha("weights"))
    path.write_text(json.dumps({"checkpoint": {"weights_digest": sha("weights")}}))
    assert not folder.evaluation_is_due("val_curve", 5, sha("weights"))


def test_a_new_folder_starts_attempt_0(folder: RunFolder) -> None:
    for resume in ("auto", "never"):
        plan = plan_launch(folder, make_record(), resume)
        assert plan.is_new and plan.attempt == 0 and plan.record == make_record() and plan.finished_line is None
    # The lock, launcher output and a stop request do not make a folder non-empty.
    folder.logs.mkdir(parents=True)
    folder.lock.touch()
    assert plan_launch(folder, make_record(), "never").is_new


def test_the_same_command_continues(folder: RunFolder) -> None:
    started(folder)
    plan = plan_launch(folder, make_record(run_id=new_run_id(), created="2026-02-01T00:00:00.000Z"), "auto")
    assert not plan.is_new and plan.attempt == 1 and plan.record.run_id == RUN_ID and plan.warnings == []


def test_never_refuses_a_folder_that_holds_anything(folder: RunFolder) -> None:
    folder.root.mkdir()
    (folder.root / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="--resume never: .* is not empty \\(notes.txt\\)"):
        plan_launch(folder, make_record(), "never")
    assert plan_launch(folder, make_record(), "auto").is_new


def test_a_finished_run_says_so(folder: RunFolder) -> None:
    started(folder)
    writer = EventWriter(folder.events, 0)
    writer.write(EventKey.RUN_END, "finished", update=20)
    writer.close()
    plan = plan_launch(folder, make_record(), "auto")
    assert plan.finished_line == f"{folder.root}: finished at update 20; nothing to do."


def test_a_file_or_half_a_run_is_refused(folder: RunFolder) -> None:
    folder.root.write_text("")
    with pytest.raises(CheckpointError, match="expected a folder, found a file"):
        plan_launch(folder, make_record(), "auto")
    folder.root.unlink()
    (folder.root / "checkpoint_00000005").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds checkpoint_00000005 but no run.json"):
        plan_launch(folder, make_record(), "auto")


def with_other_window() -> dict[str, Any]:
    config = json.loads(json.dumps(make_record().config))
    config["layers"][1]["window"] = 32
    return config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 43}, "seed: this run has 42, the launch has 43."),
        ({"mode": "smoke", "smoke_updates": 2}, "mode: this run is open and stays so; the launch is smoke."),
        ({"method": "other"}, "method: this run has 'toy', the launch has 'other'."),
        ({"num_updates": 10}, "num_updates: this run has 20, the launch has 10."),
        (
            {"config": with_other_window(), "config_digest": sha("x")},
            "config.layers[1].window: this run has 0, the launch has 32.",
        ),
        (
            {"protocol": {"id": "demo-v1", "digest": sha("demo"), "constants": {}}},
            "protocol.id: this run has 'test-v1'",
        ),
        (
            {"data": {**make_record().data.model_dump(), "tokenizer": sha("other")}},
            f"data.tokenizer: this run has '{sha('tokenizer')}'",
        ),
    ],
)
def test_every_difference_is_named(folder: RunFolder, changes: dict[str, Any], expected: str) -> None:
    """F23."""
    started(folder)
    before = folder.run_json.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        plan_launch(folder, make_record(**changes), "auto")
    lines = str(caught.value).splitlines()
    assert any(expected in line for line in lines)
    assert "cannot be continued by this launch" in lines[-1]
    assert folder.run_json.read_bytes() == before


def test_a_smoke_folder_never_becomes_formal(folder: RunFolder) -> None:
    started(folder, mode="smoke", smoke_updates=2)
    for changes in ({"mode": "formal"}, {"mode": "open"}, {"mode": "formal", "smoke_updates": 2}):
        with pytest.raises(CheckpointError, match="this run is smoke and stays so; the launch is"):
            plan_launch(folder, make_record(**changes), "auto")


def test_other_code_is_refused_in_formal_runs_and_a_warning_in_open_ones(folder: RunFolder) -> None:
    code = make_record().code.model_dump()
    files = {"models/decoder.py": sha("changed"), "protocol.py": sha("protocol"), "new.py": sha("new")}
    other = {"code": {**code, "source_digest": sha("other source"), "source_files": files}}
    started(folder)
    (warning,) = plan_launch(folder, make_record(**other), "auto").warnings
    assert "code differs from the run's: models/decoder.py, new.py." in warning
    formal = started(RunFolder(folder.root.with_name("formal")), mode="formal")
    with pytest.raises(CheckpointError, match=r"code differs from the run's: models/decoder\.py, new\.py\."):
        plan_launch(formal, make_record(mode="formal", **other), "auto")


def test_a_named_checkpoint_of_a_moved_run_keeps_its_run_id(folder: RunFolder, tmp_path: Path) -> None:
    """F24."""
    saved = save(tmp_path, 5)
    plan = plan_launch(folder, make_record(run_id="9" * 16), str(saved.path))
    assert plan.is_new and plan.record.run_id == RUN_ID
    with pytest.raises(CheckpointError, match="nowhere"):
        plan_launch(folder, make_record(), str(tmp_path / "nowhere"))
