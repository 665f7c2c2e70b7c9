"""What runs are compared with: the recorded commit, registered configurations, imports, the data's manifest."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import provenance
from nexttransformer.audit.check import Needs
from nexttransformer.audit.code_reference import DECLARED_IMPORTS, CommitCode, InstalledCode, imports_outside
from nexttransformer.audit.data import document_problems
from nexttransformer.audit.reference import FULL_TASKS_FILE, Reference, make_reference
from nexttransformer.audit.report import AuditRecord
from nexttransformer.data.manifest import load_manifest, seal
from nexttransformer.protocol import PROTOCOLS
from tests.audit.conftest import found
from tests.audit.edit import RunCopy

ROOT = Path(__file__).parents[2]


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    result = subprocess.run(["git", *identity, "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository with two commits of a small package; returns its root and the first commit."""
    root = tmp_path / "repository"
    package = root / "src/nexttransformer"
    (package / "models").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "empty.py").write_text("")
    (package / "models/b.py").write_bytes(b"b = 2\n\xff\x00")
    (package / "configs").mkdir()
    (package / "configs/copy.json").write_text("{}")
    (root / "configs/baseline").mkdir(parents=True)
    (root / "configs/baseline/m.json").write_text('{"first": 1}')
    git(root.parent, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    commit = git(root, "rev-parse", "HEAD")
    (package / "a.py").write_text("a = 2\n")
    git(root, "commit", "-q", "-a", "-m", "second")
    return root, commit


def test_a_commits_files_are_those_of_its_checkout(repository: tuple[Path, str]) -> None:
    root, commit = repository
    code = CommitCode(root)
    git(root, "checkout", "-q", commit)
    expected = provenance.source_digest(provenance_files(root / "src/nexttransformer"))
    git(root, "checkout", "-q", "main")
    files = code.package_files(commit)
    assert provenance.source_digest(files) == expected and set(files) == {"a.py", "empty.py", "models/b.py"}
    assert code.package_file(commit, "a.py") == b"a = 1\n" and code.package_file(commit, "none.py") is None
    assert code.config(commit, "baseline", "m") == b'{"first": 1}'
    assert code.config(commit, "baseline", "n") is None


def provenance_files(package: Path) -> dict[str, str]:
    """Returns the package's files as a run records them; not patched by the session."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("fresh_provenance", provenance.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["fresh_provenance"] = module
    spec.loader.exec_module(module)
    return module.package_files(package)


@pytest.mark.parametrize("commit", [None, "HEAD", "a" * 40, "--upload-pack=x"])
def test_an_unknown_commit_cannot_be_judged(commit: str | None, repository: tuple[Path, str]) -> None:
    for root in (repository[0], None):
        with pytest.raises(Needs):
            CommitCode(root).package_files(commit)


def test_imports() -> None:
    source = (
        b"import os, requests\nfrom torch import nn\nfrom urllib3.util import x\nfrom . import y\nimport numpy.linalg"
    )
    assert imports_outside(source) == ("requests", "urllib3")
    text = (ROOT / "pyproject.toml").read_text()
    declared = {re.split(r"[\[<>=]", name)[0] for name in re.findall(r'"([a-z][\w.-]*(?:\[\w+\])?[<>=][^"]*)"', text)}
    # fla-core installs `fla`; triton comes with torch.
    assert {name for name in DECLARED_IMPORTS - {"nexttransformer", "fla", "triton"}} <= declared


def test_a_part_with_a_foreign_import_is_reported(
    run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference
) -> None:
    class Code(InstalledCode):
        def package_file(self, commit: str | None, path: str) -> bytes | None:
            return b"import requests\n"

    record = audit(run, reference=dataclasses.replace(reference, code=Code()))
    assert found(record) == {("P4", "warning")} and record.exit_code == 0


def test_a_method_without_configuration(run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference) -> None:
    class Code(InstalledCode):
        def config(self, commit: str | None, family: str, method: str) -> bytes | None:
            return None

    record = audit(run, reference=dataclasses.replace(reference, code=Code()))
    assert {pair for pair in found(record) if pair[1] == "error"} == {("P2", "error")}
    assert {pair[0] for pair in found(record) if pair[1] == "unjudged"} >= {"C3", "C4", "M1", "M4"}


def test_references() -> None:
    formal, demo = make_reference("formal-v1"), make_reference("demo-v1")
    assert (formal.division, formal.mode, formal.code.is_commit) == ("formal", "formal", True)
    assert (demo.division, demo.mode, demo.code.is_commit) == ("demo", "open", False)
    assert set(demo.data_order) == set(PROTOCOLS["demo-v1"].bpb_updates())
    assert len(formal.core_tasks["tasks"]) == len(demo.core_tasks["tasks"]) == 22
    assert sum(task["rows"] for task in formal.core_tasks["tasks"]) == 91_037
    assert FULL_TASKS_FILE.is_file()


def change_data(manifest_change: Callable[[dict[str, Any]], None], source: Path, target: Path) -> Path:
    """Copies prepared data with an edited and sealed manifest."""
    shutil.copytree(source, target)
    value = load_manifest(source).to_dict()
    manifest_change(value)
    (target / "manifest.json").write_text(json.dumps(seal(value).to_dict()))
    return target


def use_data(run: RunCopy, reference: Reference, folder: Path) -> Reference:
    """Makes the run and what is published name the manifest of a data folder."""
    digest = load_manifest(folder).digest
    with run.edit("run.json") as value:
        value["data"]["manifest"] = digest
    for event in run.events:
        if event["key"] == "attempt_start":
            event["meta"]["data"]["manifest"] = digest
    for name in run.checkpoints():
        with run.edit(f"{name}/trainer_state.json") as value:
            value["digests"]["manifest"] = digest
    run.seal()
    published = {**reference.published, "manifest": digest}
    return dataclasses.replace(reference, published=published, data_folder=folder)


def test_data_comparisons_pass(
    run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference, prepared_data: Path
) -> None:
    assert audit(run, reference=dataclasses.replace(reference, data_folder=prepared_data)).findings == []


def test_a_validation_shard_in_training(
    run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference, prepared_data: Path, tmp_path: Path
) -> None:
    def change(value: dict[str, Any]) -> None:
        value["splits"]["train"]["documents"] = [
            *value["splits"]["train"]["documents"],
            value["splits"]["val_final"]["documents"][0],
        ]

    changed = use_data(run, reference, change_data(change, prepared_data, tmp_path / "data"))
    assert found(audit(run, reference=changed)) == {("D4", "error")}


def test_common_documents(prepared_data: Path) -> None:
    value = load_manifest(prepared_data).to_dict()
    assert list(document_problems(load_manifest(prepared_data))) == []
    value["splits"]["val_curve"]["documents"] = value["splits"]["val_final"]["documents"]
    messages = [finding.message for finding in document_problems(seal(value))]
    assert set(messages) == {"A document is in both val_curve and val_final."}


def test_rows_of_other_data(
    run: RunCopy, audit: Callable[..., AuditRecord], reference: Reference, prepared_data: Path
) -> None:
    run.line(3)["rows_hash"] = "00000000000000ff"
    run.seal_chain()
    run.seal()
    order = {update: int(run.line(update)["data_chain"], 16) for update in (5, 10, 15, 20)}
    # Even if somebody had published that order: the rows themselves tell.
    forged = dataclasses.replace(reference, data_order=order)
    assert audit(run, reference=forged).findings == []
    record = audit(run, reference=dataclasses.replace(forged, data_folder=prepared_data))
    assert found(record) == {("D2", "error")}
