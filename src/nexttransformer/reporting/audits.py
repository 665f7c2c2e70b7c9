"""Finding and reading the audit that belongs to a run."""

from dataclasses import dataclass
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import NextTransformerError
from nexttransformer.reporting.tolerant import dig

_FOLDERS = ("evidence/audits", "evidence/demo/audits")


@dataclass(frozen=True)
class Finding:
    """One finding of an audit."""

    check: str
    severity: str
    message: str
    where: str
    expected: str
    got: str


@dataclass(frozen=True)
class AuditView:
    """An audit's judgement. `is_stale`: the run's log went on after it."""

    verdict: str
    division: str
    findings: list[Finding]
    checks: dict[str, str]
    is_stale: bool
    file_name: str


def find_audit(root: Path, run_id: str | None, method: str | None, last_seq: int) -> tuple[AuditView | None, list[str]]:
    """Looks for the audit of this run (same run id) in the evidence folders here and beside the run.

    Returns:
        The audit or None, and what could not be read.
    """
    problems: list[str] = []
    bases = dict.fromkeys([Path.cwd(), *list(root.resolve().parents)[:3]])
    for base in bases:
        for folder in _FOLDERS:
            for path in sorted((base / folder).glob("*.json")):
                try:
                    value = jsonio.read_json(path)
                except NextTransformerError as error:
                    # Another method's damaged file says nothing about this run.
                    if path.stem == method:
                        problems.append(str(error).replace(str(path), f"{folder}/{path.name}"))
                    continue
                if run_id is not None and dig(value, "run_id", str) == run_id:
                    return _parse(value, f"{folder}/{path.name}", last_seq), problems
    return None, problems


def _parse(value: object, file_name: str, last_seq: int) -> AuditView:
    findings = [
        Finding(
            check=dig(item, "id", str) or "?",
            severity=dig(item, "severity", str) or "?",
            message=dig(item, "message", str) or "",
            where=dig(item, "where", str) or "",
            expected=_text(item, "expected"),
            got=_text(item, "got"),
        )
        for item in dig(value, "findings", list) or []
    ]
    checks = {key: state for key, state in (dig(value, "checks", dict) or {}).items() if isinstance(state, str)}
    judged = dig(value, "last_seq", int)
    return AuditView(
        verdict=dig(value, "verdict", str) or "?",
        division=dig(value, "division", str) or "?",
        findings=findings,
        checks=checks,
        is_stale=judged is not None and judged != last_seq,
        file_name=file_name,
    )


def _text(item: object, key: str) -> str:
    value = item.get(key) if isinstance(item, dict) else None
    return "" if value is None else str(value)
