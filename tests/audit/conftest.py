import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nexttransformer import provenance
from nexttransformer.audit.reference import Reference, make_reference
from nexttransformer.audit.report import AuditRecord, audit_run
from tests.audit.edit import RunCopy, copy_run
from tests.finished_run import METHOD, freeze_package, make_run

NewFindings = set[tuple[str, str]]


@pytest.fixture(scope="session")
def finished_run(prepared_site: Path) -> Iterator[Path]:
    """The real run of the session; this process believes in the package files of the moment it was made."""
    folder = prepared_site.parent / "finished_run"
    files = folder.with_suffix(".files.json")
    made = make_run(prepared_site, folder, provenance.package_files())
    with pytest.MonkeyPatch.context() as patch:
        freeze_package(json.loads(files.read_text()), patch)
        yield made


@pytest.fixture(scope="session")
def reference(finished_run: Path) -> Reference:
    return make_reference("test-v1")


@pytest.fixture(scope="session")
def clean_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as a clean commit would have recorded it, without the folder that was put aside."""
    run = copy_run(finished_run, tmp_path_factory.mktemp("clean") / "run")
    for path in run.root.glob("rejected_*/*"):
        path.unlink()
    for path in run.root.glob("rejected_*"):
        path.rmdir()
    with run.edit("run.json") as value:
        codes = [value["code"], *(event["meta"]["code"] for event in run.events if event["key"] == "attempt_start")]
        for code in codes:
            code["commit"], code["is_clean"] = "c" * 40, True
    run.seal()
    return run.root


@pytest.fixture
def run(clean_run: Path, tmp_path: Path) -> RunCopy:
    return copy_run(clean_run, tmp_path / "run")


@pytest.fixture
def audit(reference: Reference) -> Callable[..., AuditRecord]:
    def judge(run: RunCopy, *, method: str = METHOD, reference: Reference = reference) -> AuditRecord:
        return audit_run(run.root, method, reference)

    return judge


def found(record: AuditRecord) -> NewFindings:
    return {(finding.id, finding.severity) for finding in record.findings}
