"""Structural check of one configuration: declarations, groups, budget rules and counted weights. Seconds on a CPU."""

from dataclasses import dataclass, field

from nexttransformer.checking.budget_rules import Track, budget_findings, deviation, find_track
from nexttransformer.checking.counting import counting_findings
from nexttransformer.checking.declarations import build_declared, declaration_findings
from nexttransformer.checking.findings import PART_ERRORS, Finding, describe_crash, refusals
from nexttransformer.checking.tiny import build_randomized, tiny_copy
from nexttransformer.config import ModelConfig
from nexttransformer.errors import ProtocolError, join_problems
from nexttransformer.models.budget import Budget, measure
from nexttransformer.protocol import Protocol


@dataclass
class Report:
    """What is known of one method under one protocol.

    Attributes:
        method, family: ids.
        config: the expanded configuration; None if the method cannot be sized.
        budget, deviation, track: sizes, F/F_ref - 1 and track; None if the model cannot be built.
        findings: of all checks so far.
    """

    method: str
    family: str
    config: ModelConfig | None
    budget: Budget | None = None
    deviation: float | None = None
    track: Track | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """Whether no finding refuses the method."""
        return not refusals(self.findings)


def measure_method(config: ModelConfig, protocol: Protocol) -> Report:
    """Checks declarations, groups and budget; fills the figures of the table."""
    report = Report(config.method, config.family, config)
    try:
        model, report.findings = build_declared(config)
        if model is None:
            return report
        report.findings += declaration_findings(model, protocol)
        report.budget = measure(model)
        report.findings += budget_findings(config, report.budget, protocol)
    except PART_ERRORS as error:
        report.findings.append(describe_crash("building the model", error))
        return report
    report.deviation = deviation(report.budget, protocol)
    report.track = find_track(report.budget, protocol)
    report.findings += report.track.notes
    return report


def count_method(config: ModelConfig) -> list[Finding]:
    """Compares measured and declared uses of every weight in a forward pass of a tiny copy."""
    # References of windowed mixers may mask a whole square, which would look like hidden work.
    try:
        return counting_findings(build_randomized(tiny_copy(config, has_windows=False)))
    except PART_ERRORS as error:
        return [describe_crash("the counted forward pass of a tiny copy", error)]


def check_config(config: ModelConfig, protocol: Protocol) -> list[Finding]:
    """Checks what a formal run and the audit require of a configuration, without data.

    Returns:
        Findings, refusals and notes; no refusal means that the method may run.
    """
    report = measure_method(config, protocol)
    return report.findings if report.budget is None else report.findings + count_method(config)


def require_config(config: ModelConfig, protocol: Protocol) -> None:
    """Refuses a configuration that breaks a rule.

    Raises:
        ProtocolError: one line for each refusal.
    """
    lines = [f"{config.method}: {finding}" for finding in refusals(check_config(config, protocol))]
    if lines:
        raise ProtocolError(join_problems(lines))
