"""T1, T2, T4: order of events and updates, resumes, tokens seen."""

from collections.abc import Iterator

import numpy as np

from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error
from nexttransformer.audit.event_schema import CheckpointSaved
from nexttransformer.audit.logs import LoggedEvent
from nexttransformer.audit.run_view import RunView
from nexttransformer.audit.timeline_view import Attempt
from nexttransformer.training.checkpoint_files import checkpoint_name
from nexttransformer.training.events import EventKey


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
        for index in own[1:][np.diff(metrics.update[own]) != 1]:
            expected, got = int(metrics.update[index - 1]) + 1, int(metrics.update[index])
            yield error(
                "Updates of an attempt are not contiguous.",
                metrics.where(index, "update"),
                expected=expected,
                got=got,
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
    metrics = view.metrics.get()
    for number, attempt in enumerate(attempts):
        yield from _resume(attempt, attempts[:number], saved)
        for index in np.flatnonzero(metrics.attempt == attempt.number)[:1]:
            where, got = metrics.where(index, "update"), int(metrics.update[index])
            yield from differs("The first update of an attempt", where, expected=attempt.first + 1, got=got)
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
