"""The export of one run: checks, package, record, checks of what was made, then both appear."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nexttransformer import jsonio
from nexttransformer.audit.check import Finding
from nexttransformer.audit.reader import Malformed, hash_file
from nexttransformer.audit.reference import make_reference
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.run_view import RunView
from nexttransformer.config import config_from_dict
from nexttransformer.errors import AuditError
from nexttransformer.export import checks
from nexttransformer.export.model_card import model_card
from nexttransformer.export.package import (
    CARD_FILE,
    check_destination,
    find_tokenizer,
    package_digests,
    replaced_folder,
    write_package,
)
from nexttransformer.export.record import Record, load_record
from nexttransformer.export.record_facts import build_record
from nexttransformer.export.reload_check import reload_in_fresh_process
from nexttransformer.export.replacing import replacement_problem
from nexttransformer.export.submission_file import Submission
from nexttransformer.export.weights import model_with, probe
from nexttransformer.site_config import load_site_config
from nexttransformer.training.checkpoint_load import load_for_evaluation


@dataclass(frozen=True)
class Request:
    """What is asked for. `output` is the record's file, `folder` the package's; `say` prints a line of progress."""

    run: Path
    method: str
    display_name: str
    audit: Path
    output: Path
    folder: Path
    submission: Path | None
    site: Path | None
    say: Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """The outcome: findings that refuse, or the record. `notes` are for the reader."""

    findings: list[Finding]
    record: Record | None
    notes: list[str]


def export(request: Request) -> Exported:
    """Exports a run. Record and package appear complete or not at all, the record last.

    Raises:
        NextTransformerError: something cannot be read or written, or an input is no such file.
    """
    check_destination(request.folder)
    audit = AuditRecord.read(request.audit, AuditError)
    submission = Submission() if request.submission is None else Submission.read(request.submission, AuditError)
    view = RunView(request.run, request.method, make_reference(audit.protocol.id))
    claim = checks.Claim(view, request.method, audit, request.audit.name, request.output.name)
    findings = checks.findings_before(claim)
    if findings:
        return Exported(findings, None, [])
    run, marker = view.run.get(), view.newest.marker.get()
    tokenizer = find_tokenizer(load_site_config(request.site), run.protocol.id, run.data.tokenizer)
    request.say("Reading the final checkpoint")
    checkpoint = load_for_evaluation(request.run / view.newest.name)

    def make_record(package: dict[str, str]) -> Record:
        # Everything is read again each time: a record depends on files alone.
        fresh = RunView(request.run, request.method, view.reference)
        return build_record(
            fresh,
            AuditRecord.read(request.audit, AuditError),
            audit_digest=_digest(request.audit),
            display_name=request.display_name,
            submission=submission,
            package=package,
        )

    draft = make_record({})
    problem = replacement_problem(request.output, draft)
    if problem:
        raise AuditError(problem)
    num_threads = torch.get_num_threads()
    config = config_from_dict(checkpoint.model_config, "model_config.json")
    request.say("Logits of the fixed prompt with the checkpoint's weights")
    expected = probe(model_with(config, marker.update, checkpoint.tensors), tokenizer)
    with replaced_folder(request.folder) as folder:
        request.say("Writing weights, tokenizer and model card")
        write_package(folder, checkpoint, tokenizer, division=audit.division)
        jsonio.write_bytes_atomic(folder / CARD_FILE, model_card(draft).encode("utf-8"))
        package = package_digests(folder)
        record, again = make_record(package), make_record(package)
        request.say("Loading the export in a fresh process")
        found = reload_in_fresh_process(folder, num_threads=num_threads)
        made = checks.Made(record, again.file_bytes(), folder, expected, found)
        findings = checks.findings_after(made)
        if findings:
            raise _Refused(findings)
    _write_record(request.output, record)
    notes = []
    if found.transformers is None:
        notes.append("Transformers is not installed here: its form was written, and not loaded.")
    return Exported([], record, notes)


def export_or_findings(request: Request) -> Exported:
    """As `export`; what the checks found on the package is returned, and the package is gone."""
    try:
        return export(request)
    except _Refused as refused:
        return Exported(refused.findings, None, [])


class _Refused(Exception):
    """Leaves the block that makes the folder, so that it is removed."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__()
        self.findings = findings


def _digest(path: Path) -> str:
    try:
        return hash_file(path)[1]
    except Malformed as problem:
        raise AuditError(f"{path}: {problem}") from None


def _write_record(path: Path, record: Record) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        jsonio.write_bytes_atomic(path, record.file_bytes())
    except OSError as problem:
        raise AuditError(f"--output {path}: cannot be written: {problem.strerror}.") from None
    assert load_record(path) == record
