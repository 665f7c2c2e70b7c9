"""The audit as a JSON file with one byte form, and as lines for people."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from nexttransformer import __version__, jsonio, provenance
from nexttransformer.audit import data, evaluation, layout, model, numerics, presets, protocol, speed, timeline, weights
from nexttransformer.audit import provenance as provenance_checks
from nexttransformer.audit.check import Finding, Severity, Status, run_checks, sort_findings, statuses
from nexttransformer.audit.reference import Reference
from nexttransformer.audit.rules import AUDIT, NEVER_WAIVED
from nexttransformer.audit.run_view import RunView
from nexttransformer.audit.waivers import WAIVERS_PATH, Waiver
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from nexttransformer.training.checkpoint_schema import ProtocolReference
from nexttransformer.training.strict_record import Count, Digest, StrictPart, StrictRecord

Verdict = Literal["pass", "refused", "cannot_judge"]

# Importing a topic registers its checks.
TOPICS = (layout, provenance_checks, protocol, data, model, timeline, presets, speed, numerics, evaluation, weights)
EXIT_CODES: dict[Verdict, int] = {"pass": EXIT_OK, "refused": EXIT_FAILED, "cannot_judge": EXIT_USAGE}


class FindingRecord(StrictPart):
    """One finding as the file holds it."""

    id: str
    severity: Severity
    message: str
    where: str
    expected: str | None
    got: str | None


class Counts(StrictPart):
    """Numbers of findings, attempts and superseded updates. What is waived is no error and not unjudged."""

    errors: Count
    warnings: Count
    unjudged: Count
    waived: Count
    attempts: Count
    superseded_updates: Count


class AuditRecord(StrictRecord):
    """`evidence/audits/<method>.json`. What could not be read is None; the same run gives the same bytes."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.audit/1"

    division: Literal["formal", "demo"]
    method: str
    run_id: str | None
    mode: str | None
    protocol: ProtocolReference
    package_version: str
    source_digest: Digest
    run_digest: Digest
    last_seq: Count | None
    final_weights_digest: Digest | None
    data_chain: str | None
    verdict: Verdict
    checks: dict[str, Status]
    findings: list[FindingRecord]
    counts: Counts

    @property
    def exit_code(self) -> int:
        """0 pass, 1 refused, 2 cannot judge."""
        return EXIT_CODES[self.verdict]

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        return jsonio.pretty_bytes(self.to_json())


def audit_run(root: Path, method: str, reference: Reference, waivers: Sequence[Waiver] = ()) -> AuditRecord:
    """Judges a run folder; reads only.

    Args:
        root: the run folder.
        method: id of the method it is said to be.
        reference: what it is judged by.
        waivers: of all runs, as maintainers committed them.

    Raises:
        AuditError: there is nothing of a run at `root`.
    """
    view = RunView(root, method, reference)
    return make_record(view, run_checks(AUDIT, view), waivers)


def make_record(view: RunView, findings: list[Finding], waivers: Sequence[Waiver] = ()) -> AuditRecord:
    """Returns the record of a run's findings."""
    run_digest = view.run_digest()
    findings = sort_findings([*findings, *_forbidden(waivers, run_digest)])
    checks = _waive(statuses(findings), waivers, run_digest)
    is_waived = [_is_waived(finding, checks) for finding in findings]
    severities = Counter(finding.severity for finding, waived in zip(findings, is_waived, strict=True) if not waived)
    verdict: Verdict = "refused" if severities["error"] else "cannot_judge" if severities["unjudged"] else "pass"
    run, events = view.run.value, view.events.value
    marker = view.newest.marker.value if view.checkpoints else None
    try:
        known = view.timeline
        num_attempts, num_superseded = len(known.attempts), len(known.superseded)
    except Exception:  # noqa: BLE001 - the checks report what is wrong; here it only means that nothing can be counted
        num_attempts = num_superseded = 0
    return AuditRecord(
        division="formal" if view.reference.division == "formal" else "demo",
        method=view.method,
        run_id=run.run_id if run else None,
        mode=run.mode if run else None,
        protocol=ProtocolReference(id=view.reference.protocol.id, digest=view.reference.protocol.digest),
        package_version=__version__,
        source_digest=provenance.source_digest(),
        run_digest=run_digest,
        last_seq=events.events[-1].event.seq if events and events.events else None,
        final_weights_digest=marker.weights_digest if marker else None,
        data_chain=marker.data_chain if marker else None,
        verdict=verdict,
        checks=checks,
        findings=[FindingRecord(**finding.__dict__) for finding in findings],
        counts=Counts(
            errors=severities["error"],
            warnings=severities["warning"],
            unjudged=severities["unjudged"],
            waived=sum(is_waived),
            attempts=num_attempts,
            superseded_updates=num_superseded,
        ),
    )


def report_lines(record: AuditRecord) -> list[str]:
    """Returns one line per finding, then the verdict with its counts."""
    words = {"pass": "passes", "refused": "is refused", "cannot_judge": "cannot be judged"}
    findings = [Finding(**finding.model_dump()) for finding in record.findings]
    lines = [finding.line(is_waived=_is_waived(finding, record.checks)) for finding in findings]
    division = "" if record.division == "formal" else " in the DEMO division"
    counts = record.counts
    waived = f", {counts.waived} waived" if counts.waived else ""
    lines.append(
        f"{record.method} {words[record.verdict]}{division}: {counts.errors} errors, {counts.warnings} warnings, "
        f"{counts.unjudged} unjudged{waived}; {counts.attempts} attempts, "
        f"{counts.superseded_updates} superseded updates."
    )
    return lines


def _forbidden(waivers: Sequence[Waiver], run_digest: str) -> list[Finding]:
    """Returns an error for each waiver of this run that nobody may give."""
    return [
        Finding(waiver.check, "error", "This check is never waived.", f"{WAIVERS_PATH} waivers[{number}].check")
        for number, waiver in enumerate(waivers)
        if waiver.run_digest == run_digest and waiver.check in NEVER_WAIVED
    ]


def _waive(checks: dict[str, Status], waivers: Sequence[Waiver], run_digest: str) -> dict[str, Status]:
    """Returns the outcomes with those that refuse or are undecided, and were waived for this run, as `waived`."""
    granted = {waiver.check for waiver in waivers if waiver.run_digest == run_digest} - NEVER_WAIVED
    refusing = {rule_id for rule_id, status in checks.items() if status in ("fail", "unjudged")}
    return {**checks, **dict.fromkeys(sorted(granted & refusing), "waived")}


def _is_waived(finding: Finding, checks: dict[str, Status]) -> bool:
    # A warning refuses nothing: it stays a warning beside what is waived.
    return finding.severity != "warning" and checks.get(finding.id) == "waived"
