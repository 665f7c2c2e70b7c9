"""T3: the preset evaluations, in the events and as files."""

from collections import defaultdict
from collections.abc import Iterator

from nexttransformer.audit import folder as folders
from nexttransformer.audit import reader
from nexttransformer.audit.check import Finding, check, differs, error, unjudged
from nexttransformer.audit.event_schema import Evaluation
from nexttransformer.audit.logs import LoggedEvent
from nexttransformer.audit.run_view import RunView
from nexttransformer.training.events import EventKey


@check("T3")
def check_evaluations(view: RunView) -> Iterator[Finding]:
    """Preset evaluations in the events, and their files."""
    protocol, timeline = view.reference.protocol, view.timeline
    preset = {("val_curve", update) for update in protocol.bpb_updates()}
    preset |= {("core", update) for update in protocol.core_updates()}
    preset |= {("final", protocol.num_updates)}
    found: dict[tuple[str, int], list[LoggedEvent]] = defaultdict(list)
    for logged in view.events.get().of(EventKey.EVALUATION):
        found[str(logged.event.value), logged.event.update].append(logged)
    for kind, update in sorted(preset - found.keys()):
        yield error(f"The preset evaluation {kind} is missing.", "events.jsonl", expected=f"at update {update}")
    for (kind, update), events in found.items():
        attempts = [logged.event.attempt for logged in events]
        if (kind, update) not in preset:
            yield error(f"An evaluation {kind} at update {update:,} is not preset.", events[0].where)
            continue
        if len(set(attempts)) != len(attempts):
            yield error(f"The evaluation {kind} at update {update:,} was made twice.", events[-1].where)
        if attempts[-1] < timeline.effective_attempt(update):
            yield error(
                f"The evaluation {kind} is of a superseded attempt.",
                events[-1].where,
                expected=f"attempt {timeline.effective_attempt(update)} or later",
                got=attempts[-1],
            )
        yield from _compare_file(view, kind, update, events[-1])


def evaluation_name(kind: str, update: int) -> str:
    """Returns the file of an evaluation, relative to the run folder."""
    return folders.FINAL_FILE if kind == "final" else f"evaluations/{kind}_{update:08d}.json"


def _compare_file(view: RunView, kind: str, update: int, logged: LoggedEvent) -> Iterator[Finding]:
    """Compares an event with the file it names."""
    name, meta = evaluation_name(kind, update), logged.meta
    if not isinstance(meta, Evaluation):
        yield unjudged("Needs an evaluation's event, which is malformed; see L4.", logged.where)
        return
    yield from differs("The file of an evaluation", f"{logged.where} meta.file", expected=name, got=meta.file)
    if not view.files.is_file(name):
        yield unjudged(f"Needs {name}, which cannot be used; see L1.", name)
        return
    digest = reader.hash_file(view.root / name)[1]
    yield from differs(
        "The digest of an evaluation's file", f"{logged.where} meta.file_digest", expected=digest, got=meta.file_digest
    )
    record = view.evaluations[name].value
    if record is None:
        yield unjudged(f"Needs {name}, which cannot be used; see L4.", name)
        return
    yield from differs("The kind of an evaluation", f"{name} kind", expected=kind, got=record.kind)
    if kind != "final":
        yield from differs("The update of an evaluation", f"{name} update", expected=update, got=record.update)
    split = {"val_curve": "val_curve", "final": "val_final"}.get(kind)
    bpb = record.bpb[split].bpb if split in record.bpb else None
    yield from differs("The value in the event", f"{logged.where} meta.bpb", expected=bpb, got=meta.bpb)
    core = record.core.core_v1 if kind == "core" and record.core is not None else None
    yield from differs("The value in the event", f"{logged.where} meta.core_v1", expected=core, got=meta.core_v1)
