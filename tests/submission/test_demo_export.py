"""The real export of the session's run, submitted in the demo division."""

from pathlib import Path

from nexttransformer import check_submission
from tests.export.exported import ExportedRun
from tests.finished_run import METHOD
from tests.submission.requests import Repository


def test_a_real_record_and_audit_are_accepted(exported: ExportedRun, tmp_path: Path, capsys) -> None:  # noqa: ANN001
    repository = Repository(tmp_path / "repository")
    files = {
        f"evidence/demo/runs/{METHOD}.json": exported.record_path.read_bytes(),
        f"evidence/demo/audits/{METHOD}.json": exported.audit.read_bytes(),
    }
    repository.branch({**files})
    words = ["--repository", str(repository.root), "--division", "demo"]
    assert check_submission.main(words) == 0, capsys.readouterr().out
    assert f"{METHOD} is accepted in the DEMO division" in capsys.readouterr().out
    assert check_submission.main(words[:2]) == 1
