"""The export of a real run: what it writes, that it writes the same again, and everything it refuses."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nexttransformer import export_run, jsonio
from nexttransformer.audit.check import Finding
from nexttransformer.errors import AuditError, ConfigError, DataError
from nexttransformer.export import checks, reload_check, run_export
from nexttransformer.export.package import package_digests
from nexttransformer.export.record import Record
from nexttransformer.export.reload_check import Reload
from nexttransformer.export.run_export import Exported, Request, export_or_findings
from nexttransformer.protocol import TEST_V1
from nexttransformer.training.weights_digest import weights_digest
from tests.export.exported import NAME, ExportedRun, stored_reload, write_audit
from tests.finished_run import METHOD

PACKAGE_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model_config.json",
    "modeling_nexttransformer.py",
    "tokenizer.json",
    "tokenizer.tiktoken.json",
    "tokenizer_config.json",
}


def final_checkpoint(run: Path) -> Path:
    return run / f"checkpoint_{TEST_V1.num_updates:08d}"


def native_reload(folder: Path, *, num_threads: int) -> Reload:
    """Loads the folder in this process, without Transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reload_check.importlib.util, "find_spec", lambda name: None)
        return reload_check.reload(folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_export, "reload_in_fresh_process", native_reload)


@pytest.fixture
def copied(exported: ExportedRun, tmp_path: Path) -> ExportedRun:
    """A copy of the run, to change."""
    run = tmp_path / "elsewhere" / "run"
    shutil.copytree(exported.run, run)
    return ExportedRun(**{**exported.__dict__, "run": run})


def ids(result: Exported) -> set[str]:
    assert result.record is None
    return {finding.id for finding in result.findings}


def test_the_command_writes_record_and_package(exported: ExportedRun) -> None:
    assert {path.name for path in exported.package.iterdir()} == PACKAGE_FILES
    record = exported.record
    assert record.digests.package == package_digests(exported.package)
    assert "in the DEMO division" in exported.output
    assert f"record {record.record_digest[:16]}" in exported.output
    stored = load_file(exported.package / "model.safetensors")
    trained = load_file(final_checkpoint(exported.run) / "model.safetensors")
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[name], trained[name]) and stored[name].dtype == torch.float32 for name in stored)
    assert record.digests.weights == weights_digest(trained)


def test_the_record_holds_what_the_run_says(exported: ExportedRun) -> None:
    record, run = exported.record, json.loads((exported.run / "run.json").read_text())
    assert (record.method, record.family, record.display_name) == (METHOD, "baseline", NAME)
    assert (record.division, record.track, record.protocol.id) == ("demo", "main", "test-v1")
    assert record.run_id == run["run_id"]
    final = json.loads((exported.run / "evaluations/final.json").read_text())["bpb"]["val_final"]
    nats = float.fromhex(record.results.bpb_final.nats_hex)
    assert record.results.bpb_final.bpb == final["bpb"] == nats / (math.log(2) * 7510)
    assert [update for update, _ in record.results.bpb_curve] == [0, 5, 10, 15, 20]
    core = json.loads((exported.run / "evaluations/core_00000020.json").read_text())["core"]
    assert record.results.core.curve == [(20, None, None)]
    assert record.results.core.core_limited == core["core_limited"]
    assert [task.label for task in record.results.core.tasks] == [task["label"] for task in core["tasks"]]
    assert len(record.results.core.tasks) == 22
    lines = [json.loads(line) for line in (exported.run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > TEST_V1.num_updates, "the run repeats updates"
    hours = 2 * sum(line["seconds"] for line in lines) / 3600
    assert record.training.gpu_hours == pytest.approx(hours, rel=1e-12)
    attempts = [(each.attempt, each.world_size, each.first_update) for each in record.training.attempts]
    assert attempts == [(0, 2, 0), (1, 2, 5)]
    assert record.training.tokens == 20 * 8 * 128
    assert record.model.num_parameters == sum(
        tensor.numel() for tensor in load_file(exported.package / "model.safetensors").values()
    )
    assert record.digests.audit == jsonio.file_digest(exported.audit)
    assert record.authors == ["Ada Example", "Ben Sample"] and record.licence == "Apache-2.0"


def test_the_record_is_small_and_in_its_one_form(exported: ExportedRun) -> None:
    content = exported.record_path.read_bytes()
    assert content == exported.record.file_bytes()
    assert len(content) < 100_000
    text = content.decode()
    assert str(exported.run) not in text and "/tmp" not in text and "time" not in json.loads(text)


def test_another_place_gives_the_same_bytes(copied: ExportedRun, quick: None, tmp_path: Path) -> None:
    result = export_or_findings(copied.request(tmp_path / "second"))
    assert result.findings == [] and result.record is not None
    assert result.notes == ["Transformers is not installed here: its form was written, and not loaded."]
    assert (tmp_path / f"second/runs/{METHOD}.json").read_bytes() == copied.record_path.read_bytes()
    assert package_digests(tmp_path / "second/package") == package_digests(copied.package)


def test_an_earlier_export_is_replaced_and_nothing_else_is(exported: ExportedRun, quick: None, tmp_path: Path) -> None:
    request = exported.request(tmp_path / "twice")
    assert export_or_findings(request).record is not None
    (request.folder / "stale.txt").write_text("left over")
    assert export_or_findings(request).record is not None
    assert {path.name for path in request.folder.iterdir()} == PACKAGE_FILES
    assert {path.name for path in (tmp_path / "twice").iterdir()} == {"package", "runs"}
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("cat")
    with pytest.raises(ConfigError, match="no earlier export"):
        export_or_findings(replace(exported.request(tmp_path), folder=other))
    assert [path.name for path in other.iterdir()] == ["cat.jpg"]


def refused(request: Request, wanted: set[str]) -> list[Finding]:
    """Exports, expects these ids and that nothing was written."""
    result = export_or_findings(request)
    assert ids(result) == wanted
    assert not request.folder.exists() and not request.output.exists()
    assert not request.folder.parent.exists() or list(request.folder.parent.glob(".*")) == []
    return result.findings


def test_k3_the_run_went_on_after_the_audit(copied: ExportedRun, tmp_path: Path) -> None:
    lines = (copied.run / "events.jsonl").read_bytes().splitlines(keepends=True)
    event = json.loads(lines[-1])
    event["seq"] += 1
    with (copied.run / "events.jsonl").open("ab") as file:
        file.write(jsonio.canonical_bytes(event) + b"\n")
    findings = refused(copied.request(tmp_path / "out"), {"K3"})
    assert [finding.where for finding in findings] == ["audit file last_seq", "audit file run_digest"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("verdict", "refused"), ("run_id", "0" * 16), ("final_weights_digest", "0" * 64), ("package_version", "9.9.9")],
)
def test_k3_an_audit_that_does_not_fit(exported: ExportedRun, tmp_path: Path, key: str, value: str) -> None:
    audit = json.loads(exported.audit.read_text())
    path = tmp_path / f"{METHOD}.json"
    path.write_text(json.dumps({**audit, key: value}))
    findings = refused(exported.request(tmp_path / "out", audit=path), {"K3"})
    assert [finding.where for finding in findings] == [f"audit file {key}"]


def test_k3_what_may_never_be_waived(exported: ExportedRun, tmp_path: Path) -> None:
    audit = json.loads(exported.audit.read_text())
    finding = {"id": "C2", "severity": "error", "message": "m", "where": "w", "expected": None, "got": None}
    path = tmp_path / f"{METHOD}.json"
    path.write_text(
        json.dumps({**audit, "checks": {**audit["checks"], "C2": "waived"}, "findings": [*audit["findings"], finding]})
    )
    findings = refused(exported.request(tmp_path / "out", audit=path), {"K3"})
    assert [finding.where for finding in findings] == ["audit file findings"]


def test_k3_a_refused_run_is_refused_here_too(copied: ExportedRun, tmp_path: Path) -> None:
    (copied.run / "evaluations/val_curve_00000005.json").unlink()
    audit = tmp_path / f"{METHOD}.json"
    write_audit(copied.run, audit)
    refused(copied.request(tmp_path / "out", audit=audit), {"K3"})


def test_l3_another_method(exported: ExportedRun, tmp_path: Path) -> None:
    findings = refused(exported.request(tmp_path / "out", method="sssl"), {"L3"})
    assert "run.json method" in {finding.where for finding in findings}
    refused(exported.request(tmp_path / "out", output=tmp_path / "out" / "x.json"), {"L3"})


def test_k2_a_zeroed_tensor(
    exported: ExportedRun, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_export.write_package

    def spoil(folder: Path, checkpoint, tokenizer, *, division: str) -> None:  # noqa: ANN001
        tensors = {**checkpoint.tensors}
        tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
        write(folder, type(checkpoint)(**{**checkpoint.__dict__, "tensors": tensors}), tokenizer, division=division)

    monkeypatch.setattr(run_export, "write_package", spoil)
    findings = refused(exported.request(tmp_path / "out"), {"K2"})
    assert {"The digest of the exported tensors differs.", "The digest of the logits after a reload differs."} <= {
        finding.message for finding in findings
    }


def test_k2_transformers_finds_something_else(exported: ExportedRun, tmp_path: Path) -> None:
    found = native_reload(exported.package, num_threads=1)
    wrong = Reload(found.logits_digest, found.greedy_ids, "5.0", ["missing_keys: x"], 2e-4, False, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_export, "reload_in_fresh_process", stored_reload(wrong))
        findings = refused(exported.request(tmp_path / "out"), {"K2"})
    assert len(findings) == 4


def test_k4_a_record_that_depends_on_the_moment(
    exported: ExportedRun, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, calls = run_export.build_record, []

    def with_clock(*arguments, **options) -> Record:  # noqa: ANN002, ANN003
        calls.append(1)
        return build(*arguments, **{**options, "display_name": f"Made at {len(calls)}"})

    monkeypatch.setattr(run_export, "build_record", with_clock)
    refused(exported.request(tmp_path / "out"), {"K4"})


def test_p6_private_text(exported: ExportedRun, quick: None, tmp_path: Path) -> None:
    findings = refused(exported.request(tmp_path / "out", display_name="Run in /home/x/run"), {"P6"})
    assert {finding.where.split(":")[0] for finding in findings} == {"record display_name", "README.md"}


def test_p6_devices_are_named(exported: ExportedRun) -> None:
    record = exported.record.to_json()
    record["training"]["attempts"][1]["gpus"] = {"cpu": 1}
    found = list(checks.private_findings(Record.from_json(record, "record")))
    assert [finding.where for finding in found] == ["record training.attempts[1].gpus"]


def test_every_problem_of_a_submission_file_is_named(exported: ExportedRun, tmp_path: Path) -> None:
    path = tmp_path / "submission.json"
    path.write_text(
        json.dumps(
            {
                "schema": "nexttransformer.submission/1",
                "author": ["A"],
                "authors": ["A\nB"],
                "links": [{"title": "x", "url": "ftp://example.org"}],
                "supersedes": {"record_digest": "12", "reason": ""},
            }
        )
    )
    with pytest.raises(AuditError) as caught:
        export_or_findings(exported.request(tmp_path / "out", submission=path))
    text = str(caught.value)
    assert "Did you mean 'authors'?" in text
    assert all(key in text for key in ("authors", "links.0.url", "supersedes.record_digest", "supersedes.reason"))


def test_the_tokenizer_must_be_the_run_s(exported: ExportedRun, tmp_path: Path) -> None:
    site = tmp_path / "site.json"
    site.write_text(json.dumps({"data_root": "nothing"}))
    with pytest.raises(DataError, match="No tokenizer with digest"):
        export_or_findings(exported.request(tmp_path / "out", site=site))


def test_exit_codes_of_the_command(exported: ExportedRun, copied: ExportedRun, tmp_path: Path) -> None:
    words = ["--method", METHOD, "--name", NAME, "--site-config", str(exported.site)]
    with (copied.run / "metrics.jsonl").open("ab") as file:
        file.write(b"{}\n")
    places = ["--output", str(tmp_path / f"{METHOD}.json"), "--export-dir", str(tmp_path / "package")]
    assert export_run.main([str(copied.run), "--audit", str(exported.audit), *words, *places]) == 1
    with pytest.raises(AuditError, match="none.json: cannot be read"):
        export_run.main([str(exported.run), "--audit", str(tmp_path / "none.json"), *words])
    with pytest.raises(ConfigError) as caught:
        export_run.main(["run", "--method", "No Id", "--name", " ", "--audit", "a", "--output", str(tmp_path)])
    assert len(str(caught.value).splitlines()) == 3


def test_a_folder_that_is_no_run(exported: ExportedRun, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="no run folder"):
        export_or_findings(exported.request(tmp_path / "out", run=exported.package))
