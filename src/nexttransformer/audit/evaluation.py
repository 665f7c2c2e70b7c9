"""E1 to E5: arithmetic of BPB and CORE, reload, identity of the evaluated weights, re-scoring."""

from collections import defaultdict
from collections.abc import Iterator

from nexttransformer.audit import folder as folders
from nexttransformer.audit.bpb_rules import bpb_of, bpb_problems
from nexttransformer.audit.cell import Cell, readable
from nexttransformer.audit.check import Finding, check, differs, error, unjudged
from nexttransformer.audit.core_rules import core_problems
from nexttransformer.audit.event_schema import CheckpointSaved, Evaluation
from nexttransformer.audit.presets import evaluation_name
from nexttransformer.audit.run_view import RunView
from nexttransformer.evaluation.results import EvaluationRecord
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS
from nexttransformer.training.events import EventKey

_SPLITS = {"val_curve": ["val_curve"], "core": [], "final": ["val_curve", "val_final"]}


def _present(view: RunView, *, is_core: bool) -> dict[str, Cell[EvaluationRecord]]:
    """Returns the expected evaluation files of a sort that are in the folder; L1 and T3 report missing ones."""
    names = folders.expected_evaluations(view.reference.protocol)
    wanted = [name for name in names if name.startswith("evaluations/core_") == is_core]
    return {name: view.evaluations[name] for name in wanted if name in view.files.entries}


@check("E1")
def check_bpb(view: RunView) -> Iterator[Finding]:
    """BPB from nats and bytes; splits asked for are there."""
    if folders.FINAL_FILE not in view.files.entries:
        yield error("There is no final BPB.", folders.FINAL_FILE, expected="a file", got="nothing")
    values, missing = readable(_present(view, is_core=False))
    yield from missing
    for name, record in values.items():
        expected = _SPLITS["final" if name == folders.FINAL_FILE else "val_curve"]
        yield from differs("The evaluated splits", f"{name} bpb", expected=expected, got=sorted(record.bpb))
        yield from differs("The list of errors", f"{name} errors", expected=[], got=record.errors)
        for split, score in record.bpb.items():
            context = view.reference.protocol.context_tokens
            yield from bpb_problems(score, context_tokens=context, where=f"{name} bpb.{split}")


@check("E2")
def check_reload(view: RunView) -> Iterator[Finding]:
    """The value in training, the fresh load's, and the final split's."""
    protocol = view.reference.protocol
    trained_name = evaluation_name("val_curve", protocol.num_updates)
    trained = view.evaluations[trained_name].get().bpb.get("val_curve")
    final = view.evaluation("final.json").get().bpb
    curve, last = final.get("val_curve"), final.get("val_final")
    if trained is None or curve is None or last is None:
        yield unjudged("Needs both splits of the final evaluation; see E1.", folders.FINAL_FILE)
        return
    pairs = (
        ("val_curve in training and freshly loaded", bpb_of(trained), protocol.bpb_reload_tolerance, trained_name),
        ("val_final and val_curve", bpb_of(last), protocol.bpb_final_tolerance, folders.FINAL_FILE),
    )
    for what, got, tolerance, where in pairs:
        if not abs(got - bpb_of(curve)) <= tolerance:
            yield error(
                f"The BPB of {what} are too far apart.",
                where,
                expected=f"{bpb_of(curve)!r} within {tolerance}",
                got=got,
            )


@check("E3")
def check_core(view: RunView) -> Iterator[Finding]:
    """Every CORE result, from tasks to means."""
    protocol, last = view.reference.protocol, view.reference.protocol.core_updates()[-1]
    if evaluation_name("core", last) not in view.files.entries:
        yield error("There is no final CORE result.", evaluation_name("core", last), expected="a file", got="nothing")
    expected = view.reference.core_tasks
    if view.run.value is not None:
        digest = BUNDLE_TASKS_DIGESTS[protocol.core_bundle]
        yield from differs(
            "The digest of the CORE bundle",
            "run.json data.core_bundle",
            expected=digest,
            got=view.run.value.data.core_bundle,
        )
    values, missing = readable(_present(view, is_core=True))
    yield from missing
    for name, record in values.items():
        yield from differs("The list of errors", f"{name} errors", expected=[], got=record.errors)
        yield from differs("The evaluated splits", f"{name} bpb", expected=[], got=sorted(record.bpb))
        if record.core is None:
            yield error("There is no CORE result.", f"{name} core", expected="an object", got=None)
        else:
            yield from core_problems(record.core, expected, protocol, where=f"{name} core")


@check("E4")
def check_weights(view: RunView) -> Iterator[Finding]:
    """Which weights each evaluation names."""
    timeline, run_id, last = view.timeline, view.run.get().run_id, view.reference.protocol.num_updates
    saved: dict[tuple[int, int], list[CheckpointSaved]] = defaultdict(list)
    for logged in view.events.get().of(EventKey.CHECKPOINT_SAVED):
        if isinstance(logged.meta, CheckpointSaved):
            saved[logged.event.attempt, logged.event.update].append(logged.meta)
    kinds = {evaluation_name("val_curve", update): update for update in view.reference.protocol.bpb_updates()}
    kinds |= {evaluation_name("core", update): update for update in view.reference.protocol.core_updates()}
    kinds |= {folders.FINAL_FILE: last}
    present = {name: view.evaluations[name] for name in kinds if name in view.files.entries}
    values, missing = readable(present)
    yield from missing
    for name, record in values.items():
        update, found = kinds[name], record.checkpoint
        yield from differs("The run of an evaluation", f"{name} run_id", expected=run_id, got=record.run_id)
        if update == 0:
            where = f"{name} checkpoint.complete_digest"
            yield from differs(
                "Weights of update 0 are in no checkpoint: the digest", where, expected=None, got=found.complete_digest
            )
            continue
        events = saved[timeline.effective_attempt(update), update]
        pairs = {(each.complete_digest, each.weights_digest) for each in events}
        if (found.complete_digest, found.weights_digest) not in pairs:
            expected = sorted(pairs)[0][0] if pairs else f"a checkpoint saved at update {update}"
            yield error(
                "The evaluated weights are not those saved at that update.",
                f"{name} checkpoint",
                expected=expected,
                got=found.complete_digest,
            )
        if update == last and view.newest.marker.value is not None:
            marker = view.newest.marker.value
            pair = (marker.complete_digest, marker.weights_digest)
            if (found.complete_digest, found.weights_digest) != pair:
                yield error(
                    "The evaluated weights are not those of the final checkpoint.",
                    f"{name} checkpoint",
                    expected=pair[0],
                    got=found.complete_digest,
                )
    for logged in view.events.get().of(EventKey.EVALUATION):
        record = values.get(evaluation_name(str(logged.event.value), logged.event.update))
        is_last = isinstance(logged.meta, Evaluation) and logged.event.attempt >= timeline.effective_attempt(
            logged.event.update
        )
        if record is not None and is_last and isinstance(logged.meta, Evaluation):
            where, expected = f"{logged.where} meta.complete_digest", record.checkpoint.complete_digest
            yield from differs(
                "The checkpoint of an evaluation", where, expected=expected, got=logged.meta.complete_digest
            )


@check("E5")
def check_rescored(view: RunView) -> Iterator[Finding]:
    """A slice scored again on this machine."""
    if view.reference.is_deep:
        # Imported here: only --deep runs a real model.
        from nexttransformer.audit.rescore import rescore

        yield from rescore(view)
