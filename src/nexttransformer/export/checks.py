"""The export's checks: L3 and K3 before anything is written, P6, K2 and K4 on what was."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nexttransformer import __version__
from nexttransformer.audit.check import Finding, check, differs, error, registered, run_check, sort_findings
from nexttransformer.audit.private_text import find_private, private_kinds
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.rules import EXPORT, NEVER_WAIVED
from nexttransformer.audit.run_view import RunView
from nexttransformer.config import method_files
from nexttransformer.export.package import CARD_FILE
from nexttransformer.export.record import URL_KEYS, Record
from nexttransformer.export.reload_check import TRANSFORMERS_TOLERANCE, Reload
from nexttransformer.export.weights import Probe
from nexttransformer.training import checkpoint_files as names
from nexttransformer.training.safetensors_file import SafetensorsReader
from nexttransformer.training.weights_digest import weights_digest

BEFORE, AFTER = ("L3", "K3"), ("P6", "K2", "K4")
AUDIT_WHERE = "audit file"


@dataclass(frozen=True)
class Claim:
    """What is to be exported: a run, said to be of a method, with its audit."""

    view: RunView
    method: str
    audit: AuditRecord
    audit_name: str
    output_name: str


@dataclass(frozen=True)
class Made:
    """What was made: the record, its bytes when built once more, the folder, and what both processes read in it."""

    record: Record
    again: bytes
    folder: Path
    probe: Probe
    reload: Reload


def findings_before(claim: Claim) -> list[Finding]:
    """Returns why nothing may be exported."""
    return _run(BEFORE, claim)


def findings_after(made: Made) -> list[Finding]:
    """Returns why what was made may not stay."""
    return _run(AFTER, made)


def _run(rule_ids: tuple[str, ...], subject: Claim | Made) -> list[Finding]:
    functions = registered(EXPORT)
    return sort_findings(found for rule in rule_ids for found in run_check(rule, functions[rule], subject))


@check("L3", stage=EXPORT)
def check_method(claim: Claim) -> Iterator[Finding]:
    """One method id everywhere."""
    run = claim.view.run.get()
    yield from differs("The run's method", "run.json method", expected=claim.method, got=run.method)
    yield from differs("The audited method", f"{AUDIT_WHERE} method", expected=claim.method, got=claim.audit.method)
    for name in (claim.audit_name, claim.output_name):
        yield from differs("The name of an evidence file", name, expected=f"{claim.method}.json", got=name)
    registered_files = method_files()
    if claim.method not in registered_files:
        yield error("The method is not registered.", "configs", expected="a shipped configuration", got=claim.method)
    else:
        family = registered_files[claim.method].parent.name
        yield from differs("The run's family", "run.json family", expected=family, got=run.family)


@check("K3", stage=EXPORT)
def check_audit(claim: Claim) -> Iterator[Finding]:
    """The audit passes and is of this run's present state, by this package."""
    view, audit = claim.view, claim.audit
    if audit.verdict != "pass":
        yield error("The audit does not pass.", f"{AUDIT_WHERE} verdict", expected="pass", got=audit.verdict)
    refusing = {found.id for found in audit.findings if found.severity != "warning"}
    contradicting = sorted(rule for rule in refusing if rule in NEVER_WAIVED or audit.checks.get(rule) != "waived")
    if audit.verdict == "pass" and contradicting:
        yield error("The audit passes with findings that refuse.", f"{AUDIT_WHERE} findings", got=contradicting)
    run, marker, events = view.run.get(), view.newest.marker.get(), view.events.get()
    present = {
        "division": view.reference.division,
        "run_id": run.run_id,
        "mode": run.mode,
        "protocol": {"id": view.reference.protocol.id, "digest": view.reference.protocol.digest},
        "package_version": __version__,
        "run_digest": view.run_digest(),
        "last_seq": events.events[-1].event.seq if events.events else None,
        "final_weights_digest": marker.weights_digest,
        "data_chain": marker.data_chain,
    }
    stated = audit.to_json()
    for key, expected in present.items():
        if stated[key] != expected:
            yield error(
                f"The audit's {key} is not that of the run as it is now. Audit it again.",
                f"{AUDIT_WHERE} {key}",
                expected=expected,
                got=stated[key],
            )


def private_findings(record: Record) -> Iterator[Finding]:
    """Yields an error for everything private in a record, and for an attempt that does not name its devices."""
    for path, kind in find_private(record.to_json(), url_keys=URL_KEYS):
        yield error(f"The record holds a {kind}.", f"record {path}")
    for attempt in record.training.attempts:
        where = f"record training.attempts[{attempt.attempt}].gpus"
        named = sum(attempt.gpus.values())
        if not all(name.strip() for name in attempt.gpus) or named != attempt.world_size:
            yield error("Not every process has a named device.", where, expected=attempt.world_size, got=named)


@check("P6", stage=EXPORT)
def check_private(made: Made) -> Iterator[Finding]:
    """Nothing private in record, card, configuration and header."""
    yield from private_findings(made.record)
    for name in (CARD_FILE, "config.json", "generation_config.json", names.CONFIG_FILE):
        for number, line in enumerate((made.folder / name).read_text(encoding="utf-8").splitlines(), start=1):
            for kind in private_kinds(line, allows_urls=name == CARD_FILE):
                yield error(f"The package holds a {kind}.", f"{name}:{number}")
    for path, kind in find_private(SafetensorsReader(made.folder / names.MODEL_FILE).metadata()):
        yield error(f"The package holds a {kind}.", f"{names.MODEL_FILE} {path}")


@check("K2", stage=EXPORT)
def check_weights(made: Made) -> Iterator[Finding]:
    """Exported tensors, their reload and what the reloaded model says."""
    where = names.MODEL_FILE
    reader = SafetensorsReader(made.folder / where)
    digest = weights_digest({name: reader.get(name) for name in reader.layout()})
    yield from differs("The digest of the exported tensors", where, expected=made.record.digests.weights, got=digest)
    found = made.reload
    yield from differs(
        "The digest of the logits after a reload", where, expected=made.probe.logits_digest, got=found.logits_digest
    )
    yield from differs("The greedy text after a reload", where, expected=made.probe.greedy_ids, got=found.greedy_ids)
    if found.transformers is None:
        return
    where = "config.json"
    if found.missing:
        yield error("Transformers does not load every tensor by name.", where, got=found.missing[:10])
    difference = found.largest_difference
    if difference is None or not difference <= TRANSFORMERS_TOLERANCE:
        limit = f"at most {TRANSFORMERS_TOLERANCE}"
        yield error("Logits through Transformers differ from the native ones.", where, expected=limit, got=difference)
    if not found.is_same_text:
        yield error("generate of Transformers continues differently from the native model.", where)
    if not found.is_same_tokens:
        yield error("AutoTokenizer gives other ids than the run's tokenizer.", "tokenizer.json")


@check("K4", stage=EXPORT)
def check_bytes(made: Made) -> Iterator[Finding]:
    """The record is a function of its inputs."""
    content = made.record.file_bytes()
    if made.again != content:
        pairs = zip(content.splitlines(), made.again.splitlines(), strict=False)
        number = next((line for line, (old, new) in enumerate(pairs, start=1) if old != new), 0)
        yield error("The record built a second time has other bytes.", f"record:{number}")
