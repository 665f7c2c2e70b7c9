"""Waivers: only the committed file counts, for one run and one check, and never for what nobody may waive."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import audit_run, jsonio, provenance
from nexttransformer.audit.reader import Malformed
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.rules import NEVER_WAIVED
from nexttransformer.audit.waivers import parse_waivers
from nexttransformer.errors import AuditError, run_command
from tests.audit.conftest import found
from tests.audit.edit import RunCopy
from tests.finished_run import METHOD

FILE = "evidence/waivers.json"
Audit = Callable[..., AuditRecord]


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, "-C", str(root), *arguments], check=True, capture_output=True)


def waiver(run_digest: str, check: str, **changes: Any) -> dict[str, Any]:
    texts = {"reason": "The mirror was restored from a copy.", "reviewer": "ada", "issue": "17"}
    return {"run_digest": run_digest, "check": check, **texts, **changes}


def content(*waivers: dict[str, Any], **changes: Any) -> bytes:
    return jsonio.pretty_bytes({"schema": "nexttransformer.waivers/1", "waivers": list(waivers), **changes})


def write(root: Path, data: bytes) -> None:
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def commit(root: Path, data: bytes) -> None:
    write(root, data)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "waivers")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit that passes for the one of the package."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    (root / "README.md").write_text("x\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "repository", lambda: root)
    return root


@pytest.fixture
def faulty(run: RunCopy) -> RunCopy:
    """A run with two C4 errors and one warning of another check."""
    run.line(12)["learning_rates"][0] = 0.03
    run.line(13)["learning_rates"][0] = 0.03
    run.write_logs()
    run.replace("notes.txt", b"x")
    return run


@pytest.fixture
def judge(tmp_path: Path) -> Callable[[RunCopy], tuple[int, AuditRecord]]:
    def command(run: RunCopy) -> tuple[int, AuditRecord]:
        output = tmp_path / "audit.json"
        arguments = [str(run.root), "--method", METHOD, "--protocol", "test-v1", "--output", str(output)]
        code = audit_run.main(arguments)
        return code, AuditRecord.from_json(json.loads(output.read_text()), "audit")

    return command


Judge = Callable[[RunCopy], tuple[int, AuditRecord]]


def test_a_waiver_turns_exactly_its_check(
    faulty: RunCopy, repository: Path, judge: Judge, audit: Audit, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before = judge(faulty)
    assert (code, before.checks["C4"], before.counts.errors, before.counts.waived) == (1, "fail", 2, 0)
    capsys.readouterr()
    # L1 has only a warning here: it refuses nothing, and so the waiver has nothing to do.
    commit(repository, content(*(waiver(before.run_digest, check) for check in ("C4", "L1", "C5"))))
    code, after = judge(faulty)
    assert (code, after.verdict, after.findings) == (0, "pass", before.findings)
    assert after.checks == {**before.checks, "C4": "waived"} and after.checks["L1"] == "warn"
    assert (after.counts.errors, after.counts.warnings, after.counts.waived) == (0, 1, 2)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("C4 error (waived): The learning rate") for line in lines) == 2
    assert "dense_full passes in the DEMO division: 0 errors, 1 warnings, 0 unjudged, 2 waived; 2 att" in lines[-2]


def test_other_errors_still_refuse(faulty: RunCopy, repository: Path, judge: Judge) -> None:
    with faulty.edit("run.json") as value:
        value["protocol"]["digest"] = "0" * 64
    _, before = judge(faulty)
    assert {"C4", "P1"} <= {rule for rule, status in before.checks.items() if status == "fail"}
    commit(repository, content(waiver(before.run_digest, "C4")))
    code, after = judge(faulty)
    assert code == 1 and after.checks == {**before.checks, "C4": "waived"}


def test_what_is_undecided_can_be_waived(
    run: RunCopy, repository: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nexttransformer.audit import check

    def broken(view: object) -> list[object]:
        raise KeyError

    monkeypatch.setitem(check._CHECKS, ("A", "T3"), broken)
    code, before = judge(run)
    assert (code, before.checks["T3"]) == (2, "unjudged")
    commit(repository, content(waiver(before.run_digest, "T3")))
    code, after = judge(run)
    assert (code, after.checks["T3"], after.counts.unjudged, after.counts.waived) == (0, "waived", 0, 1)


def test_what_does_nothing(
    faulty: RunCopy, repository: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = judge(faulty)
    good = content(waiver(before.run_digest, "C4"))
    commit(repository, content(waiver("0" * 64, "C4")))
    assert judge(faulty) == (1, before), "of another run"
    write(repository, good)
    assert judge(faulty) == (1, before), "not committed"
    git(repository, "add", ".")
    assert judge(faulty) == (1, before), "only in the index"
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, good)
    monkeypatch.chdir(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert judge(faulty) == (1, before), "of another repository"


def test_the_run_folder_is_never_read(faulty: RunCopy, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "repository", lambda: None)
    git(faulty.root, "init", "-q")
    write(faulty.root, b"")
    _, before = judge(faulty)
    commit(faulty.root, content(waiver(before.run_digest, "C4")))
    monkeypatch.chdir(faulty.root)
    code, after = judge(faulty)
    assert (code, after.checks["C4"], after.run_digest) == (1, "fail", before.run_digest)


def test_an_installed_package_takes_the_repository_around(
    faulty: RunCopy, repository: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "repository", lambda: None)
    _, before = judge(faulty)
    commit(repository, content(waiver(before.run_digest, "C4")))
    monkeypatch.chdir(repository / "evidence")
    assert judge(faulty)[0] == 0


def test_never_waived(run: RunCopy, repository: Path, judge: Judge) -> None:
    run.line(12)["rows"] = 7
    run.write_logs()
    _, before = judge(run)
    assert found(before) == {("C2", "error")}
    commit(repository, content(*(waiver(before.run_digest, check) for check in sorted(NEVER_WAIVED))))
    code, after = judge(run)
    assert (code, after.counts.waived, "waived" in after.checks.values()) == (1, 0, False)
    added = [finding for finding in after.findings if finding not in before.findings]
    assert {finding.id for finding in added} == NEVER_WAIVED and len(added) == len(NEVER_WAIVED)
    places = {check: f"{FILE} waivers[{number}].check" for number, check in enumerate(sorted(NEVER_WAIVED))}
    assert {finding.id: finding.where for finding in added} == places
    assert {finding.severity for finding in added} == {"error"}
    commit(repository, content(waiver("0" * 64, "C2")))
    assert judge(run) == (1, before), "another run's entry"


BROKEN = {
    "no JSON": (b"{", "not valid JSON"),
    "a list": (b"[]", "expected a JSON object"),
    "schema": (content(schema="nexttransformer.waivers/2"), "schema: expected 'nexttransformer.waivers/1'"),
    "no check": (content(waiver("0" * 64, "C9")), "'C9' is none of the 45 checks"),
    "key": (content(waiver("0" * 64, "C4", until="2030")), "unknown key 'waivers.0.until'"),
    "empty": (content(waiver("0" * 64, "C4", reason="")), "waivers.0.reason"),
    "two problems": (content(waiver("0", "C4", issue=17)), "waivers.0.issue"),
    "twice": (b'{"schema": "nexttransformer.waivers/1", "waivers": [], "waivers": []}', "uplicate"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_malformed(kind: str) -> None:
    data, part = BROKEN[kind]
    with pytest.raises(Malformed) as problem:
        parse_waivers(data)
    assert part in str(problem.value) and "\n" not in str(problem.value)


def test_a_malformed_file_ends_the_command(
    run: RunCopy, repository: Path, judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(repository, content(waiver("0", "C4", issue=17)))
    with pytest.raises(SystemExit) as end:
        run_command(lambda _: judge(run)[0])
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == "" and not (tmp_path / "audit.json").exists()
    assert len(printed.err.splitlines()) == 1
    assert all(part in printed.err for part in (FILE, "run_digest", "issue", "audit again"))
    (repository / FILE).unlink()
    (repository / FILE).symlink_to("../README.md")
    git(repository, "commit", "-q", "-a", "-m", "link")
    with pytest.raises(AuditError, match="no regular file"):
        judge(run)
