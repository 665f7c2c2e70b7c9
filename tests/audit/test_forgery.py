"""A smoke run dressed up as a complete one, step by step: refused at every step, at the end by independent checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nexttransformer.audit.report import AuditRecord
from tests.audit.conftest import found
from tests.audit.edit import RunCopy, copy_run
from tests.training.trainer_runs import arguments, train_rank

# Every one of these refuses a sealed forgery by itself.
INDEPENDENT = {"L1", "L2", "C1", "T1", "T2", "T3", "T4", "D2", "E1", "E3"}


@pytest.fixture(scope="module")
def smoke_run(finished_run: Path, prepared_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke") / "run"
    assert train_rank(0, 1, arguments(prepared_site, folder, "--smoke-steps", "2"), []) == (0, "")
    return folder


@contextmanager
def all_json(run: RunCopy) -> Iterator[list[dict]]:
    """Gives every JSON object of the run with a mode, to edit."""
    names = ["run.json", *(f"evaluations/{path.name}" for path in run.root.glob("evaluations/*.json"))]
    names += [f"{name}/{file}" for name in run.checkpoints() for file in ("trainer_state.json", "complete.json")]
    opened = [run.edit(name) for name in names]
    values = [each.__enter__() for each in opened]
    yield values
    for each in opened:
        each.__exit__(None, None, None)


def test_a_smoke_run_never_passes(smoke_run: Path, tmp_path: Path, audit: Callable[..., AuditRecord]) -> None:
    run = copy_run(smoke_run, tmp_path / "run")
    record = audit(run)
    assert record.exit_code == 1 and record.mode == "smoke"

    def edit_run(value: dict) -> None:
        value["mode"], value["smoke_updates"] = "open", None

    with run.edit("run.json") as value:
        edit_run(value)
    assert audit(run).exit_code == 1
    for event in run.events:
        if event["key"] == "attempt_start":
            event["meta"]["mode"] = "open"
    run.seal()
    assert audit(run).exit_code == 1
    with all_json(run) as values:
        for value in values:
            value["mode"] = "open"
            if "last_update" in value:
                value["last_update"] = value["num_updates"]
    for name in run.checkpoints():
        path = run.root / name / "model.safetensors"
        content = path.read_bytes().replace(b'"mode":"smoke"', b'"mode":"open" ')
        run.replace(f"{name}/model.safetensors", content)
    run.seal()
    record = audit(run)
    errors = {rule_id for rule_id, severity in found(record) if severity == "error"}
    assert errors >= INDEPENDENT and record.exit_code == 1
    # It says of itself that it ended, at the update of a whole run.
    with run.edit("run_state.json") as value:
        value["update"] = 20
    run.events[-1]["update"] = 20
    run.events[-1]["meta"]["checkpoint"] = "checkpoint_00000020"
    (run.root / "checkpoint_00000002").rename(run.root / "checkpoint_00000020")
    run.seal()
    errors = {rule_id for rule_id, severity in found(audit(run)) if severity == "error"}
    assert errors >= INDEPENDENT - {"L2"}


def test_an_open_run_edited_to_formal(run: RunCopy, audit: Callable[..., AuditRecord]) -> None:
    with all_json(run) as values:
        for value in values:
            value["mode"] = "formal"
    for event in run.events:
        if event["key"] == "attempt_start":
            event["meta"]["mode"] = "formal"
    run.seal()
    assert ("L2", "error") in found(audit(run))
