"""E1 and E3 of a record: every number that follows from others is computed again."""

import math
from collections.abc import Iterator

from nexttransformer.audit.bpb_rules import bpb_problems
from nexttransformer.audit.check import Finding, check, differs, error
from nexttransformer.audit.reference import make_reference
from nexttransformer.audit.rules import REQUEST
from nexttransformer.evaluation.core_result import NUM_TASKS, centered
from nexttransformer.evaluation.results import SplitScore
from nexttransformer.export.record import CoreOfRecord
from nexttransformer.protocol import EXCERPT_BUNDLE, Protocol
from nexttransformer.submission.evidence_checks import protocol_of
from nexttransformer.submission.subject import Subject

_TOLERANCE = 1e-12


@check("E1", stage=REQUEST)
def check_bpb(subject: Subject) -> Iterator[Finding]:
    """Final BPB from its nats and bytes, its counts, and the curve's updates."""
    record, protocol = subject.record, protocol_of(subject)
    final, where = record.results.bpb_final, f"{subject.record_path()} results"
    score = SplitScore(
        split_digest=record.digests.val_final,
        byte_table_version=protocol.byte_table_version,
        byte_table_digest=record.digests.byte_table,
        rows=protocol.val_final_rows,
        **final.model_dump(),
    )
    yield from bpb_problems(score, context_tokens=protocol.context_tokens, where=f"{where}.bpb_final")
    published = protocol.published().get("val_final", {})
    for key in ("bytes", "tokens_counted"):
        if key in published:
            place = f"{where}.bpb_final.{key}"
            yield from differs("A count of val_final", place, expected=published[key], got=getattr(final, key))
    updates = [update for update, _ in record.results.bpb_curve]
    expected = protocol.bpb_updates()
    if updates != expected:
        text = f"the {len(expected)} preset updates"
        yield error("The BPB curve has other updates.", f"{where}.bpb_curve", expected=text, got=len(updates))
    for number, (_, bpb) in enumerate(record.results.bpb_curve):
        if bpb <= 0:
            yield error("A BPB of the curve is impossible.", f"{where}.bpb_curve[{number}]", got=bpb)


@check("E3", stage=REQUEST)
def check_core(subject: Subject) -> Iterator[Finding]:
    """Tasks, rows and centered values of the bundle, and both means."""
    record, protocol = subject.record, protocol_of(subject)
    core, where = record.results.core, f"{subject.record_path()} results.core"
    tasks = make_reference(protocol.id).core_tasks["tasks"]
    labels = [task["label"] for task in tasks]
    found = [task.label for task in core.tasks]
    if found != labels:
        missing = sorted(set(labels) - set(found))
        yield error(
            "Not the bundle's tasks in its order.", f"{where}.tasks", expected=f"{NUM_TASKS} tasks", got=missing
        )
        return
    for number, (task, entry) in enumerate(zip(core.tasks, tasks, strict=True)):
        place = f"{where}.tasks[{number}]"
        yield from differs(f"Rows of {task.label}", f"{place}.rows", expected=entry["rows"], got=task.rows)
        if not 0 <= task.num_correct <= task.rows or not task.rows:
            yield error(f"Correct rows of {task.label}.", f"{place}.num_correct", got=task.num_correct)
            continue
        for key, baseline in (("centered_v1", "random_baseline"), ("centered_v2", "random_baseline_v2")):
            expected, got = centered(task.num_correct / task.rows, entry[baseline]), getattr(task, key)
            if not abs(got - expected) <= _TOLERANCE:
                yield error(f"{task.label}: {key} does not follow.", f"{place}.{key}", expected=expected, got=got)
    yield from _curve_findings(core, protocol, where)


def _curve_findings(core: CoreOfRecord, protocol: Protocol, where: str) -> Iterator[Finding]:
    updates = [update for update, _, _ in core.curve]
    if updates != protocol.core_updates():
        expected = f"the {len(protocol.core_updates())} preset updates"
        yield error("CORE has other updates.", f"{where}.curve", expected=expected, got=len(updates))
        return
    means = {
        version: math.fsum(getattr(task, f"centered_{version}") for task in core.tasks) / NUM_TASKS
        for version in ("v1", "v2")
    }
    is_limited = protocol.core_bundle == EXCERPT_BUNDLE
    for number, (_, *values) in enumerate(core.curve):
        if any((value is None) != is_limited for value in values):
            expected = "no CORE value of an excerpt" if is_limited else "a CORE value"
            yield error("CORE is there or missing wrongly.", f"{where}.curve[{number}]", expected=expected, got=values)
            return
    pairs = [("core_limited", means["v1"] if is_limited else None, core.core_limited)]
    if not is_limited:
        _, core_v1, core_v2 = core.curve[-1]
        pairs += [("core_v1", means["v1"], core_v1), ("core_v2", means["v2"], core_v2)]
    for key, expected, got in pairs:
        is_equal = got == expected if got is None or expected is None else abs(got - expected) <= _TOLERANCE
        if not is_equal:
            yield error(f"{key} is not the mean of the tasks.", f"{where} {key}", expected=expected, got=got)
