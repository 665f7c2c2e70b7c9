"""T1 to T5: order of events and updates, resumes, preset evaluations, tokens seen, plausibility of speed."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime

import numpy as np

from nexttransformer.audit import folder as folders
from nexttransformer.audit import reader
from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error, unjudged, warning
from nexttransformer.audit.event_schema import CheckpointSaved, Evaluation
from nexttransformer.audit.logs import LoggedEvent
from nexttransformer.audit.run_view import RunView
from nexttransformer.audit.timeline_view import Attempt, Timeline
from nexttransformer.training.checkpoint_files import checkpoint_name
from nexttransformer.training.events import EventKey

GAP_SECONDS = 1800
MANY_ATTEMPTS = 20


@check("T1")
def check_sequence(view: RunView) -> Iterator[Finding]:
    """Numbers, hashes and times of events; attempts; every update once."""
    yield from guarded({"events": lambda: _event_order(view), "updates": lambda: _update_order(view)})


def _event_order(view: RunView) -> Iterator[Finding]:
    log = view.events.get()
    before: LoggedEvent | None = None
    num_starts = 0
    for number, logged in enumerate(log.events):
        event, where = logged.event, logged.where
        if number != event.seq:
            yield error("Event numbers are not contiguous.", f"{where} seq", expected=number, got=event.seq)
        expected = before.hash if before is not None else ""
        if event.prev != expected:
            yield error(
                "The hash of the line before differs: a line was lost or edited.",
                f"{where} prev",
                expected=expected,
                got=event.prev,
            )
        is_start = event.key == EventKey.ATTEMPT_START.value
        num_starts += is_start
        if event.attempt != num_starts - 1:
            yield error(
                "The attempt of an event is not the one that is open.",
                f"{where} attempt",
                expected=num_starts - 1,
                got=event.attempt,
            )
        if before is not None and not is_start and event.time < before.event.time:
            yield error(
                "Time runs backwards inside an attempt.",
                f"{where} time",
                expected=f"{before.event.time} or later",
                got=event.time,
            )
        before = logged


def _update_order(view: RunView) -> Iterator[Finding]:
    metrics, timeline = view.metrics.get(), view.timeline
    unknown = ~np.isin(metrics.attempt, list(timeline.attempts))
    for index in np.flatnonzero(unknown):
        yield error(
            "A line of an attempt that never started.", metrics.where(index, "attempt"), got=int(metrics.attempt[index])
        )
    for index in np.flatnonzero(metrics.attempt[1:] < metrics.attempt[:-1]) + 1:
        yield error("A line of an older attempt.", metrics.where(index, "attempt"), got=int(metrics.attempt[index]))
    for attempt in timeline.attempts.values():
        own = np.flatnonzero(metrics.attempt == attempt.number)
        expected = np.concatenate([[attempt.first], metrics.update[own][:-1]]) + 1
        for index, update in zip(
            own[metrics.update[own] != expected], expected[metrics.update[own] != expected], strict=True
        ):
            yield error(
                "Updates of an attempt are not contiguous.",
                metrics.where(index, "update"),
                expected=int(update),
                got=int(metrics.update[index]),
            )
    missing = timeline.missing
    if len(missing):
        yield error(
            "Updates have no line on the effective timeline.",
            "metrics.jsonl",
            expected=f"1 to {timeline.num_updates}",
            got=f"{len(missing)} missing, the first is {missing[0]}",
        )


@check("T2")
def check_resumes(view: RunView) -> Iterator[Finding]:
    """Where every attempt began, and that together they cover the run."""
    timeline = view.timeline
    saved = [each for each in view.events.get().of(EventKey.CHECKPOINT_SAVED) if isinstance(each.meta, CheckpointSaved)]
    attempts = list(timeline.attempts.values())
    if attempts[0].number != 0 or attempts[0].first != 0:
        yield error(
            "The first attempt does not start at update 0.", attempts[0].start.where, expected=0, got=attempts[0].first
        )
    for number, attempt in enumerate(attempts):
        yield from _resume(attempt, attempts[:number], saved)
    covered = timeline.attempt_of[1:] >= 0
    if not covered.all():
        first = 1 + int(np.flatnonzero(~covered)[0])
        yield error(
            "The attempts do not cover all updates.",
            "events.jsonl",
            expected=f"1 to {timeline.num_updates}",
            got=f"nothing at {first}",
        )
    run_id = view.run.get().run_id
    for checkpoint in view.checkpoints.values():
        for cell in (checkpoint.marker, checkpoint.state):
            if cell.value is not None:
                yield from differs(
                    "The run of a checkpoint", f"{cell.where} run_id", expected=run_id, got=cell.value.run_id
                )
        if checkpoint.header is not None and checkpoint.header.value is not None:
            where, got = f"{checkpoint.header.where} metadata.run_id", checkpoint.header.value.metadata.get("run_id")
            yield from differs("The run of a checkpoint", where, expected=run_id, got=got)


def _resume(attempt: Attempt, before: list[Attempt], saved: list[LoggedEvent]) -> Iterator[Finding]:
    """Checks one attempt's start against the checkpoints saved until then."""
    meta, where = attempt.meta, f"{attempt.start.where} meta"
    yield from differs(
        "The update at the start", attempt.start.where, expected=meta.resumed_update, got=attempt.start.event.update
    )
    if attempt.first == 0 and meta.resumed_from is None and meta.resumed_complete_digest is None:
        return
    effective = max((each.number for each in before if each.first < attempt.first <= each.last), default=None)
    if effective is None:
        yield error("The run resumes at an update it never reached.", f"{where}.resumed_update", got=attempt.first)
        return
    yield from differs(
        "The checkpoint's folder",
        f"{where}.resumed_from",
        expected=checkpoint_name(attempt.first),
        got=meta.resumed_from,
    )
    digests = {
        each.meta.complete_digest
        for each in saved
        if isinstance(each.meta, CheckpointSaved)
        and (each.event.attempt, each.event.update) == (effective, attempt.first)
        and each.line < attempt.start.line
    }
    if meta.resumed_complete_digest not in digests:
        expected = sorted(digests) or f"a checkpoint saved at update {attempt.first}"
        yield error(
            "The run does not resume at a checkpoint it saved.",
            f"{where}.resumed_complete_digest",
            expected=expected,
            got=meta.resumed_complete_digest,
        )


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


@check("T4")
def check_tokens(view: RunView) -> Iterator[Finding]:
    """Tokens seen, in lines, events and checkpoints, up to the whole run's."""
    protocol = view.reference.protocol
    per_update = protocol.tokens_per_update

    def lines() -> Iterator[Finding]:
        metrics = view.metrics.get()
        for index in np.flatnonzero(metrics.tokens_seen != metrics.update * per_update):
            expected = int(metrics.update[index]) * per_update
            yield error(
                "Tokens seen differ.",
                metrics.where(index, "tokens_seen"),
                expected=expected,
                got=int(metrics.tokens_seen[index]),
            )
        last = int(metrics.update.max()) * per_update if len(metrics) else 0
        if last < protocol.num_tokens:
            yield error(
                "The run has not seen all tokens.", "metrics.jsonl tokens_seen", expected=protocol.num_tokens, got=last
            )

    def events() -> Iterator[Finding]:
        for logged in view.events.get().of(EventKey.CHECKPOINT_SAVED):
            if isinstance(logged.meta, CheckpointSaved):
                expected = logged.event.update * per_update
                yield from differs(
                    "Tokens seen", f"{logged.where} meta.tokens_seen", expected=expected, got=logged.meta.tokens_seen
                )

    def checkpoints() -> Iterator[Finding]:
        for update, checkpoint in view.checkpoints.items():
            for cell in (checkpoint.marker, checkpoint.state):
                if cell.value is not None:
                    yield from differs(
                        "Tokens seen",
                        f"{cell.where} tokens_seen",
                        expected=update * per_update,
                        got=cell.value.tokens_seen,
                    )
            if checkpoint.state.value is not None:
                where, expected = f"{checkpoint.state.where} next_row", update * protocol.global_batch_rows
                yield from differs("The next row", where, expected=expected, got=checkpoint.state.value.next_row)

    yield from guarded({"lines": lines, "events": events, "checkpoints": checkpoints})


@check("T5")
def check_plausibility(view: RunView) -> Iterator[Finding]:
    """Speed, gaps, number of attempts, repeated updates."""
    metrics, timeline = view.metrics.get(), view.timeline
    for index in np.flatnonzero(
        ~(np.isnan(metrics.mfu_fraction) | ((metrics.mfu_fraction > 0) & (metrics.mfu_fraction < 1)))
    ):
        yield warning(
            "The share of the device's peak is implausible.",
            metrics.where(index, "mfu_fraction"),
            expected="between 0 and 1",
            got=float(metrics.mfu_fraction[index]),
        )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        speed = metrics.tokens / metrics.seconds
        is_bad = ~((metrics.seconds > 0) & (np.abs(metrics.tokens_per_second / speed - 1) < 0.01))
    for index in np.flatnonzero(is_bad):
        yield warning(
            "Tokens per second do not fit the seconds.",
            metrics.where(index, "tokens_per_second"),
            got=float(metrics.tokens_per_second[index]),
        )
    for index in np.flatnonzero(metrics.seconds > GAP_SECONDS):
        yield warning(
            "An update took more than 30 minutes.", metrics.where(index, "seconds"), got=float(metrics.seconds[index])
        )
    events = view.events.get().events
    for before, after in zip(events[:-1], events[1:], strict=True):
        if after.event.key == EventKey.ATTEMPT_START.value and _seconds(before, after) > GAP_SECONDS:
            yield warning(
                "More than 30 minutes between two attempts.", after.where, got=f"{_seconds(before, after):.0f} seconds"
            )
    if len(timeline.attempts) > MANY_ATTEMPTS:
        yield warning("The run took many attempts.", "events.jsonl", got=len(timeline.attempts))
    yield from _repeated_updates(view, timeline)


def _repeated_updates(view: RunView, timeline: Timeline) -> Iterator[Finding]:
    """Compares superseded lines with those that count, where both attempts computed alike."""
    metrics = view.metrics.get()
    for index in timeline.superseded:
        update, old = int(metrics.update[index]), timeline.attempts.get(int(metrics.attempt[index]))
        new = timeline.attempts.get(timeline.effective_attempt(update))
        if old is None or new is None or not 1 <= update <= timeline.num_updates:
            continue
        other = timeline.line_of[update]
        is_alike = (old.meta.world_size, old.meta.micro_batch) == (new.meta.world_size, new.meta.micro_batch)
        if is_alike and other >= 0 and metrics.loss_nats[index] != metrics.loss_nats[other]:
            where, got = metrics.where(other, "loss_nats"), float(metrics.loss_nats[other])
            yield warning(
                f"Repeating update {update:,} gave another loss.",
                where,
                expected=float(metrics.loss_nats[index]),
                got=got,
            )


def _seconds(before: LoggedEvent, after: LoggedEvent) -> float:
    start, end = (datetime.fromisoformat(each.event.time.replace("Z", "+00:00")) for each in (before, after))
    return (end - start).total_seconds()
