"""Findings, the registry of checks, and running them so that no input can end in a traceback."""

import dataclasses
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nexttransformer import jsonio
from nexttransformer.audit.private_text import mask
from nexttransformer.audit.rules import AUDIT, RULES, RUN_RULE_IDS

Severity = Literal["error", "warning", "unjudged"]
Status = Literal["pass", "warn", "fail", "unjudged", "deferred", "waived"]

MAX_VALUE_CHARACTERS = 200
# Findings of one check that are listed one by one; the rest are counted.
MAX_LISTED = 40
_ABSENT = object()
_LETTERS = {"error": "E", "warning": "W"}
# ASCII only: text of a hostile file must not steer a terminal, reorder a line or depend on a console's encoding.
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True)
class Finding:
    """One result of a check. `where` is a file of the run, then a line or key; values are cut texts."""

    id: str
    severity: Severity
    message: str
    where: str
    expected: str | None = None
    got: str | None = None

    def line(self, *, is_waived: bool = False) -> str:
        """Returns the line that is printed."""
        values = [f"{name} {value}" for name, value in (("expected", self.expected), ("got", self.got)) if value]
        place = f"{self.where}: {', '.join(values)}" if values else self.where
        severity = f"{self.severity} (waived)" if is_waived else self.severity
        return f"{self.id} {severity}: {self.message} {place}."


class Needs(Exception):
    """Raised by a check whose input cannot be had: the check becomes `unjudged` with this pointer."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def show(value: Any) -> str:
    """Returns a value as one printable line of at most 200 characters, private text masked."""
    text = value if isinstance(value, str) else jsonio.canonical_bytes(value).decode("utf-8")
    text = _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", mask(text[: 4 * MAX_VALUE_CHARACTERS]))
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def _draft(severity: Severity, message: str, where: str, expected: Any, got: Any) -> Finding:
    values = [None if value is _ABSENT else show(value) for value in (expected, got)]
    return Finding("", severity, show(message), show(where), *values)


def error(message: str, where: str, *, expected: Any = _ABSENT, got: Any = _ABSENT) -> Finding:
    """Returns a finding that refuses; the check's id is filled in when it is run."""
    return _draft("error", message, where, expected, got)


def warning(message: str, where: str, *, expected: Any = _ABSENT, got: Any = _ABSENT) -> Finding:
    """Returns a finding that is only reported."""
    return _draft("warning", message, where, expected, got)


def unjudged(message: str, where: str) -> Finding:
    """Returns a finding that says why (a part of) a check could not be decided."""
    return _draft("unjudged", message, where, _ABSENT, _ABSENT)


def differs(what: str, where: str, *, expected: Any, got: Any) -> Iterator[Finding]:
    """Yields an error if two values differ."""
    if got != expected:
        yield error(f"{what} differs.", where, expected=expected, got=got)


Check = Callable[[Any], Iterable[Finding]]
CheckType = TypeVar("CheckType", bound=Check)
_CHECKS: dict[tuple[str, str], Check] = {}


def check(rule_id: str, *, stage: str = AUDIT) -> Callable[[CheckType], CheckType]:
    """Registers a function (subject -> findings) as the check of a rule at a stage."""
    assert stage in RULES[rule_id].stages, f"{rule_id} is not checked at stage {stage}"
    assert (stage, rule_id) not in _CHECKS, f"{rule_id} has two checks at stage {stage}"

    def register(function: CheckType) -> CheckType:
        _CHECKS[stage, rule_id] = function
        return function

    return register


def registered(stage: str) -> dict[str, Check]:
    """Returns rule id -> check of a stage, in the order of the rules."""
    return {rule_id: _CHECKS[stage, rule_id] for rule_id in RULES if (stage, rule_id) in _CHECKS}


def run_check(rule_id: str, function: Check, subject: Any) -> list[Finding]:
    """Runs one check; whatever it raises becomes a finding of its id with severity `unjudged`."""
    findings: list[Finding] = []
    unlisted: Counter[Severity] = Counter()
    try:
        for finding in function(subject):
            assert finding.severity == "unjudged" or _LETTERS[finding.severity] in RULES[rule_id].severities
            if len(findings) < MAX_LISTED:
                findings.append(dataclasses.replace(finding, id=rule_id))
            else:
                unlisted[finding.severity] += 1
    except Needs as missing:
        findings.append(dataclasses.replace(unjudged(str(missing), missing.where), id=rule_id))
    except Exception as problem:  # noqa: BLE001 - garbage must not crash the audit; the check is then undecided
        findings.append(dataclasses.replace(_crash(problem), id=rule_id))
    for severity, number in sorted(unlisted.items()):
        findings.append(Finding(rule_id, severity, f"{number} more findings of this kind are not listed.", "run"))
    return findings


def run_checks(stage: str, subject: Any) -> list[Finding]:
    """Runs all checks of a stage on a subject and returns their findings, sorted."""
    found = [
        finding for rule_id, function in registered(stage).items() for finding in run_check(rule_id, function, subject)
    ]
    return sort_findings(found)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings without repetition in the order of rules, then of places (line numbers as numbers)."""
    order = {rule_id: number for number, rule_id in enumerate(RULES)}

    def key(finding: Finding) -> tuple[Any, ...]:
        place = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", finding.where)]
        return order[finding.id], place, finding.severity, finding.message, finding.expected or "", finding.got or ""

    return sorted(set(findings), key=key)


def statuses(findings: Iterable[Finding], stage: str = AUDIT) -> dict[str, Status]:
    """Returns the outcome of each of the 45 checks at a stage."""
    found: dict[str, set[str]] = {rule_id: set() for rule_id in RUN_RULE_IDS}
    for finding in findings:
        found[finding.id].add(finding.severity)
    names: tuple[tuple[str, Status], ...] = (("error", "fail"), ("unjudged", "unjudged"), ("warning", "warn"))
    result: dict[str, Status] = {}
    for rule_id, severities in found.items():
        outcome: list[Status] = [status for severity, status in names if severity in severities]
        result[rule_id] = "deferred" if stage not in RULES[rule_id].stages else outcome[0] if outcome else "pass"
    return result


def _crash(problem: Exception) -> Finding:
    # The text of a foreign exception may hold addresses or paths; type and place are the same everywhere.
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if "nexttransformer" in frame.filename]
    place = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "unknown"
    return unjudged(f"The check could not be decided: {type(problem).__name__} in {place}.", "run")
