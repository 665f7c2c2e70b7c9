"""Judging a pull request: all checks of stage R, and the text that is printed and posted."""

from dataclasses import dataclass

from nexttransformer.audit.check import Finding, Needs, run_checks
from nexttransformer.audit.rules import HUMAN_RULES, REQUEST, RULES
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from nexttransformer.export.record import DEMO_MARK
from nexttransformer.export.replacing import Change
from nexttransformer.submission import evidence_checks, request_checks, result_checks
from nexttransformer.submission.subject import Subject

# Importing a topic registers its checks.
TOPICS = (evidence_checks, result_checks, request_checks)


@dataclass(frozen=True)
class Judgement:
    """Findings of a request and the published numbers that it changes."""

    subject: Subject
    findings: list[Finding]
    changes: list[Change]

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 refused, 2 cannot judge."""
        severities = {finding.severity for finding in self.findings}
        return EXIT_FAILED if "error" in severities else EXIT_USAGE if "unjudged" in severities else EXIT_OK

    def lines(self) -> list[str]:
        """Returns findings, the rules they cite, changed numbers and the verdict."""
        subject = self.subject
        lines = [finding.line() for finding in self.findings]
        # What is unjudged points to the finding that says why.
        broken = {finding.id for finding in self.findings if finding.severity != "unjudged"}
        cited = [rule for rule in RULES if rule in broken]
        lines += [f"Rule {rule}: {RULES[rule].text}" for rule in cited]
        lines += [f"Changes {change.line()}" for change in self.changes]
        words = {EXIT_OK: "is accepted", EXIT_FAILED: "is refused", EXIT_USAGE: "cannot be judged"}
        mark = f" in the {DEMO_MARK} division" if subject.division == "demo" else ""
        counts = [sum(each.severity == kind for each in self.findings) for kind in ("error", "warning", "unjudged")]
        lines.append(
            f"{subject.method} {words[self.exit_code]}{mark}: {counts[0]} errors, {counts[1]} warnings, {counts[2]} "
            f"unjudged, {len(self.changes)} published numbers changed; merge base {subject.base[:12]}."
        )
        if self.exit_code == EXIT_OK:
            lines.append(f"People still judge {', '.join(HUMAN_RULES)}.")
        return lines


def judge(subject: Subject) -> Judgement:
    """Runs all checks of a pull request."""
    findings = run_checks(REQUEST, subject)
    try:
        changed = request_checks.published_changes(subject)
    except Needs:
        # Reported by the checks.
        changed = []
    return Judgement(subject, findings, changed)
