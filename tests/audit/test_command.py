"""The command: exit codes, where it writes, usage, and that nothing relaxes it."""

import json
from pathlib import Path

import pytest

from nexttransformer import audit_run, jsonio
from nexttransformer.audit.report import AuditRecord
from nexttransformer.errors import NextTransformerError, run_command
from tests.audit.conftest import found
from tests.audit.edit import RunCopy
from tests.finished_run import METHOD


def arguments(root: Path, output: Path, *more: str) -> list[str]:
    return [str(root), "--method", METHOD, "--protocol", "test-v1", "--output", str(output), *more]


def read(path: Path) -> AuditRecord:
    return AuditRecord.from_json(json.loads(path.read_text()), "audit")


def test_passes_and_writes(run: RunCopy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(str(path) for path in run.root.rglob("*"))
    output = tmp_path / "deep/audit.json"
    assert audit_run.main(arguments(run.root, output)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "dense_full passes in the DEMO division: 0 errors, 0 warnings, 0 unjudged; 2 attempts, 3 superseded updates.",
        f"Written: {output}",
    ]
    record = read(output)
    assert (record.division, record.verdict, record.last_seq) == ("demo", "pass", len(run.events) - 1)
    assert output.read_bytes() == record.to_bytes() == jsonio.pretty_bytes(json.loads(output.read_text()))
    assert sorted(str(path) for path in run.root.rglob("*")) == before


def test_refused_prints_every_finding(run: RunCopy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.line(12)["learning_rates"][0] = 0.03
    run.line(13)["rows"] = 7
    run.write_logs()
    assert audit_run.main(arguments(run.root, tmp_path / "a.json")) == 1
    lines = capsys.readouterr().out.splitlines()
    number = run.metrics.index(run.line(12)) + 1
    assert (
        lines[0] == f"C2 error: An update does not have all rows. metrics.jsonl:{number + 1} rows: expected 8, got 7."
    )
    assert lines[1].startswith(
        f"C4 error: The learning rate of group matrix differs. metrics.jsonl:{number} learning_rates[0]: expected 0.01"
    )
    assert lines[1].endswith(", got 0.03.") and "is refused" in lines[2]
    assert read(tmp_path / "a.json").verdict == "refused"


def test_default_outputs() -> None:
    assert audit_run.default_output("gdn", "formal") == Path("evidence/audits/gdn.json")
    assert audit_run.default_output("gdn", "demo") == Path("evidence/demo/audits/gdn.json")


def test_a_demo_run_is_no_formal_run(run: RunCopy, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    assert audit_run.main([str(run.root), "--method", METHOD, "--output", str(output)]) == 1
    record = read(output)
    errors = {rule_id for rule_id, severity in found(record) if severity == "error"}
    assert record.division == "formal" and {"L1", "L2", "P1", "C1", "C2", "T1", "T3", "T4"} <= errors


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "other"])
def test_nothing_of_a_run(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    if kind == "file":
        root.write_text("x")
    elif kind != "missing":
        root.mkdir()
    if kind == "other":
        (root / "package.json").write_text("{}")
        (root / "src").mkdir()
    with pytest.raises(NextTransformerError) as error:
        audit_run.main(arguments(root, tmp_path / "a.json"))
    assert "\n" not in str(error.value) and not (tmp_path / "a.json").exists()


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--protocol", "proxy-v1"], "never become records"),
        (["--protocol", "formal-v2"], "Did you mean"),
        (["--deep"], "--data"),
        (["--method", "../x"], "method id"),
        (["--data", "nowhere"], "no prepared data"),
    ],
)
def test_usage(more: list[str], part: str, run: RunCopy, tmp_path: Path) -> None:
    with pytest.raises(NextTransformerError, match=part):
        audit_run.main(arguments(run.root, tmp_path / "a.json", *more))


def test_output_inside_the_run_is_refused(run: RunCopy) -> None:
    with pytest.raises(NextTransformerError, match="never changes"):
        audit_run.main(arguments(run.root, run.root / "audit.json"))


def test_options_are_frozen() -> None:
    parser = audit_run._parser()
    names = {name for action in parser._actions for name in action.option_strings}
    assert names == {"-h", "--help", "--method", "--output", "--data", "--deep", "--protocol"}


def test_nothing_in_the_folder_or_the_environment_relaxes_a_check(
    run: RunCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.line(12)["rows"] = 7
    run.write_logs()
    for name in ("waivers.json", "audit.json", "skip_checks", ".auditrc"):
        run.replace(name, b'{"skip": ["C2"], "checks": {"C2": "waived"}}')
    for name in ("NEXTTRANSFORMER_SKIP", "NEXTTRANSFORMER_WAIVERS", "SKIP_CHECKS", "CI"):
        monkeypatch.setenv(name, "C2")
    assert audit_run.main(arguments(run.root, tmp_path / "a.json")) == 1
    record = read(tmp_path / "a.json")
    assert found(record) == {("C2", "error"), ("L1", "warning")} and record.counts.waived == 0


def test_garbage_in_every_file(run: RunCopy, tmp_path: Path) -> None:
    for path in sorted(run.root.rglob("*")):
        if path.is_file():
            run.replace(str(path.relative_to(run.root)), b"\x00\xff[[[" * 50)
    assert audit_run.main(arguments(run.root, tmp_path / "a.json")) == 1
    record = read(tmp_path / "a.json")
    assert record.run_id is None and ("L4", "error") in found(record)
    assert set(record.checks.values()) <= {"pass", "fail", "unjudged", "deferred", "warn"}
    assert record.checks["C4"] == record.checks["E1"] == record.checks["K1"] == "unjudged"


def test_a_raising_check_is_unjudged(run: RunCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nexttransformer.audit import check

    def broken(view: object) -> list[object]:
        raise KeyError("0x7f00 /home/x")

    monkeypatch.setitem(check._CHECKS, ("A", "N2"), broken)
    assert audit_run.main(arguments(run.root, tmp_path / "a.json")) == 2
    (finding,) = read(tmp_path / "a.json").findings
    assert (finding.id, finding.severity) == ("N2", "unjudged")
    assert "KeyError" in finding.message and "/home" not in finding.message


def test_control_c_writes_nothing(run: RunCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nexttransformer.audit.report.audit_run", interrupt)
    with pytest.raises(SystemExit) as end:
        run_command(audit_run.main, arguments(run.root, tmp_path / "a.json"))
    assert end.value.code == 130 and not (tmp_path / "a.json").exists()
