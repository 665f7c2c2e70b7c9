"""The checks that need record and audit alone: L3, L4, L5, P1, P6, K3, K4."""

import hashlib
from collections.abc import Iterator

from nexttransformer.audit.check import Finding, check, differs, error, show, statuses, warning
from nexttransformer.audit.folder import SAFE_NAME
from nexttransformer.audit.private_text import find_private
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.rules import NEVER_WAIVED, REQUEST, RUN_RULE_IDS
from nexttransformer.export.checks import private_findings
from nexttransformer.export.record import MAX_RECORD_BYTES, Record
from nexttransformer.protocol import Protocol
from nexttransformer.submission.subject import EVIDENCE, Subject

MAX_AUDIT_BYTES = 200 * 1000


def protocol_of(subject: Subject) -> Protocol:
    """Returns the record's protocol; falls back to the division's first, as P1 reports the rest."""
    known = {protocol.id: protocol for protocol in subject.protocols}
    return known.get(subject.record.protocol.id, subject.protocols[0])


@check("L4", stage=REQUEST)
def check_schemas(subject: Subject) -> Iterator[Finding]:
    """Both files parse and match their schemas."""
    for file in (subject.record_file, subject.audit_file):
        for problem in file.problems:
            key, separator, text = problem.partition(": ")
            yield error(text, f"{file.path} {key}") if separator else error(problem, file.path)


@check("L3", stage=REQUEST)
def check_method(subject: Subject) -> Iterator[Finding]:
    """One method id in names and contents, of a configuration that the merge base has."""
    record, method = subject.record, subject.method
    for what, path, got in (
        ("The record's method", subject.record_path(), record.method),
        ("The audit's method", subject.audit_path, subject.audit.method),
    ):
        yield from differs(what, f"{path} method", expected=method, got=got)
    config = f"configs/{record.family}/{record.method}.json"
    if config not in subject.before:
        yield error(
            "The merge base has no such configuration: code and configuration are merged before the run.",
            f"{subject.record_path()} family",
            expected=config,
            got="none",
        )


@check("L5", stage=REQUEST)
def check_files(subject: Subject) -> Iterator[Finding]:
    """Kind, name and size of every changed evidence file."""
    limits = {subject.record_path(): MAX_RECORD_BYTES, subject.audit_path: MAX_AUDIT_BYTES}
    for path in subject.changed:
        entry = subject.after.get(path)
        if entry is None or not path.startswith(EVIDENCE):
            continue
        if not entry.is_regular:
            yield warning("Not a regular file.", path)
        if not all(SAFE_NAME.fullmatch(part) for part in path.split("/")):
            yield warning("A name holds other characters than letters, digits, dot, _ and -.", path)
        limit = limits.get(path)
        if limit is not None and entry.num_bytes > limit:
            yield warning("The file is too long.", path, expected=f"at most {limit} bytes", got=entry.num_bytes)


@check("P1", stage=REQUEST)
def check_protocol(subject: Subject) -> Iterator[Finding]:
    """Protocol id and digest of both files."""
    expected = {protocol.id: protocol.digest for protocol in subject.protocols}
    for path, got in (
        (subject.record_path(), subject.record.protocol),
        (subject.audit_path, subject.audit.protocol),
    ):
        if got.id not in expected:
            yield error(
                "Not a protocol of this division.", f"{path} protocol.id", expected=sorted(expected), got=got.id
            )
        else:
            where = f"{path} protocol.digest"
            yield from differs("The protocol's digest", where, expected=expected[got.id], got=got.digest)


@check("P6", stage=REQUEST)
def check_private(subject: Subject) -> Iterator[Finding]:
    """Nothing private in either file."""
    yield from private_findings(subject.record)
    for path, kind in find_private(subject.audit.to_json()):
        yield error(f"The audit holds a {kind}.", f"{subject.audit_path} {path}")


@check("K4", stage=REQUEST)
def check_bytes(subject: Subject) -> Iterator[Finding]:
    """Both files are in the one form in which commands write them."""
    for file, expected in (
        (subject.record_file, subject.record.file_bytes()),
        (subject.audit_file, subject.audit.to_bytes()),
    ):
        if file.content != expected:
            yield error("The file is not as the command writes it: sorted keys, one form of numbers.", file.path)


@check("K3", stage=REQUEST)
def check_ties(subject: Subject) -> Iterator[Finding]:
    """The audit passes, is of the record's run, and no other record is of that run."""
    record, audit = subject.record, subject.audit
    where, audit_where = subject.record_path(), subject.audit_path
    yield from differs("The division", f"{where} division", expected=subject.division, got=record.division)
    yield from differs("The verdict", f"{audit_where} verdict", expected="pass", got=audit.verdict)
    digest = hashlib.sha256(subject.audit_file.content).hexdigest()
    yield from differs(
        "The digest of the audit file", f"{where} digests.audit", expected=digest, got=record.digests.audit
    )
    warnings = [finding.id for finding in audit.findings if finding.severity == "warning"]
    pairs = {
        "division": (audit.division, record.division),
        "run_id": (audit.run_id, record.run_id),
        "protocol": (audit.protocol.model_dump(), record.protocol.model_dump()),
        "digests.run": (audit.run_digest, record.digests.run),
        "digests.weights": (audit.final_weights_digest, record.digests.weights),
        "digests.data_chain": (audit.data_chain, record.digests.data_chain),
        "audit.num_warnings": (len(warnings), record.audit.num_warnings),
        "audit.warning_ids": (sorted(set(warnings)), record.audit.warning_ids),
        "audit.num_waivers": (audit.counts.waived, record.audit.num_waivers),
    }
    for key, (expected, got) in pairs.items():
        yield from differs("Record and audit are not of one run:", f"{where} {key}", expected=expected, got=got)
    mode = "formal" if subject.division == "formal" else "open"
    yield from differs("The run's mode", f"{audit_where} mode", expected=mode, got=audit.mode)
    yield from _outcome_findings(subject, audit)
    yield from _duplicates(subject, record)


def _outcome_findings(subject: Subject, audit: AuditRecord) -> Iterator[Finding]:
    """The outcome of each check follows from the findings; what is waived was waived by a maintainer."""
    where = f"{subject.audit_path} checks"
    yield from differs("The list of checks", where, expected=sorted(RUN_RULE_IDS), got=sorted(audit.checks))
    unknown = sorted({finding.id for finding in audit.findings} - set(RUN_RULE_IDS))
    if unknown:
        yield error("Findings of unknown checks.", f"{subject.audit_path} findings", got=unknown)
        return
    waived = {rule for rule, status in audit.checks.items() if status == "waived"}
    granted = {waiver.check for waiver in subject.waivers if waiver.run_digest == audit.run_digest}
    for rule in sorted(waived):
        if rule in NEVER_WAIVED or rule not in granted:
            yield error(
                "A check is waived without a maintainer's waiver.", f"{where}.{rule}", got=show(audit.checks[rule])
            )
    # A Finding of the file has the same fields as one of a check.
    expected = statuses([Finding(**finding.model_dump()) for finding in audit.findings])
    for rule in RUN_RULE_IDS:
        if rule not in waived and rule in audit.checks:
            yield from differs(
                "The outcome of a check", f"{where}.{rule}", expected=expected[rule], got=audit.checks[rule]
            )
    if any(expected[rule] in ("fail", "unjudged") for rule in RUN_RULE_IDS if rule not in waived):
        yield error("The audit holds findings that refuse.", f"{subject.audit_path} findings")


def _duplicates(subject: Subject, record: Record) -> Iterator[Finding]:
    for path, other in subject.other_records():
        for key, own, theirs in (
            ("run_id", record.run_id, other.run_id),
            ("digests.weights", record.digests.weights, other.digests.weights),
        ):
            if own == theirs:
                yield error("Another record is of the same run.", f"{subject.record_path()} {key}", got=path)
