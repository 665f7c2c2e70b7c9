"""Speed and memory on a run of full length, and checks that only a formal run can show.

Time is that of this process: the command is one process, and the machine may be busy with others.
"""

import dataclasses
import json
import resource
import sys
import time
from pathlib import Path

import pytest

from nexttransformer.audit.check import registered, run_check, run_checks
from nexttransformer.audit.report import make_record, report_lines
from nexttransformer.audit.run_view import RunView
from tests.audit.conftest import found
from tests.audit.full_length import METHOD, FullLengthRun, StubCode

MAX_SECONDS, MAX_BYTES = 60, 2 * 2**30


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> FullLengthRun:
    return FullLengthRun(tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def view_and_seconds(full_run: FullLengthRun) -> tuple[RunView, float]:
    began = time.process_time()
    return RunView(full_run.root, METHOD, full_run.reference), time.process_time() - began


def test_a_full_length_run_is_judged_fast(full_run: FullLengthRun, view_and_seconds: tuple[RunView, float]) -> None:
    view, seconds = view_and_seconds
    began = time.process_time()
    record = make_record(view, run_checks("A", view))
    seconds += time.process_time() - began
    assert record.verdict == "pass", "\n".join(report_lines(record))
    assert record.division == "formal" and record.findings == []
    assert record.counts.superseded_updates == 177 + 450
    assert (full_run.root / "metrics.jsonl").stat().st_size > 20_000_000
    assert seconds < MAX_SECONDS
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < MAX_BYTES


def test_kernels_with_tiles_need_a_recorded_tuning(
    view_and_seconds: tuple[RunView, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_and_seconds[0]
    check = registered("A")["P5"]
    given = view.attempt_starts

    def judge(path: str, mode: str = "formal") -> list[str]:
        starts = []
        for logged, meta in given:
            choices = [choice.model_copy(update={"path": path}) for choice in meta.kernels.choices]
            kernels = meta.kernels.model_copy(update={"choices": choices})
            starts.append((logged, meta.model_copy(update={"kernels": kernels, "mode": mode})))
        monkeypatch.setattr(RunView, "attempt_starts", property(lambda view: starts))
        return [finding.message for finding in run_check("P5", check, view)]

    assert judge("native") == [] and judge("fla", "open") == []
    findings = judge("fla")
    assert len(findings) == len(given) and all("are not recorded" in message for message in findings)


def test_a_configuration_over_budget_is_refused(
    view_and_seconds: tuple[RunView, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_and_seconds[0]
    # The stub's MLP has 256 columns; 28 more cost 1.9 % of the whole.
    code = StubCode(mlp_width=284)
    monkeypatch.setattr(view, "reference", dataclasses.replace(view.reference, code=code))
    findings = run_check("M2", registered("A")["M2"], view)
    assert [finding.severity for finding in findings] == ["error", "error"]
    assert "outside the budget" in findings[0].message and "+1.9" in str(findings[0].got)


def test_nothing_published_cannot_be_judged(
    view_and_seconds: tuple[RunView, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_and_seconds[0]
    monkeypatch.setattr(view, "reference", dataclasses.replace(view.reference, published={}, data_order={}))
    checks = registered("A")
    findings = [each for rule_id in ("D1", "D2", "D3", "D4") for each in run_check(rule_id, checks[rule_id], view)]
    record = make_record(view, findings)
    assert found(record) == {(rule_id, "unjudged") for rule_id in ("D1", "D2", "D3", "D4")}
    assert record.exit_code == 2


def test_a_curve_outside_the_records_is_for_a_human(
    view_and_seconds: tuple[RunView, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_and_seconds[0]
    own = {update: 0.75 + 0.3 / (1 + update / 1000) for update in view.reference.protocol.bpb_updates()}

    def publish(number: int, factor: float) -> None:
        curve = [[update, bpb * factor] for update, bpb in own.items()]
        record = {"method": f"m{number}", "protocol": {"id": "formal-v1"}, "results": {"bpb_curve": curve}}
        (tmp_path / f"m{number}.json").write_text(json.dumps(record))

    monkeypatch.setattr(view, "reference", dataclasses.replace(view.reference, evidence=tmp_path))
    publish(1, 1.05)
    publish(2, 1.06)
    assert run_check("N3", registered("A")["N3"], view) == []
    publish(3, 1.07)
    findings = run_check("N3", registered("A")["N3"], view)
    assert {finding.severity for finding in findings} == {"warning"} and "envelope" in findings[0].message
    publish(3, 0.99)
    assert run_check("N3", registered("A")["N3"], view) == []
