"""T5: plausibility of speed, gaps, number of attempts, agreement of repeated updates."""

from collections.abc import Iterator
from datetime import datetime

import numpy as np

from nexttransformer.audit.check import Finding, check, warning
from nexttransformer.audit.logs import LoggedEvent
from nexttransformer.audit.run_view import RunView
from nexttransformer.audit.timeline_view import Timeline
from nexttransformer.training.events import EventKey

GAP_SECONDS = 1800
MANY_ATTEMPTS = 20


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
