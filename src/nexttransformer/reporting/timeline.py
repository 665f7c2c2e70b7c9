"""Which lines of a run count: attempts and the effective timeline (docs: rules, "effective timeline").

Attempt k covers updates (r_k, e_k]: r_k is the update it resumed at, e_k its last metrics line. The effective
attempt of an update is the last one that covers it. While a run goes on, updates beyond the newest attempt's end
are superseded as well: they will be repeated.
"""

from dataclasses import dataclass

from nexttransformer.training.events import Event, EventKey
from nexttransformer.training.metrics import MetricsLine


@dataclass(frozen=True)
class Attempt:
    """One launch. `last_update` is None while it has no metrics line; `end` None where no end is recorded."""

    number: int
    resumed_update: int
    last_update: int | None
    start: Event | None
    end: Event | None
    last_time: str | None

    def covers(self, update: int) -> bool:
        """Whether the update is one of (r_k, e_k]."""
        return self.last_update is not None and self.resumed_update < update <= self.last_update


@dataclass(frozen=True)
class Timeline:
    """Attempts by number, effective lines by update, and superseded lines in file order."""

    attempts: list[Attempt]
    effective: list[MetricsLine]
    superseded: list[MetricsLine]

    @property
    def last_update(self) -> int:
        """Completed updates of the effective history."""
        end = self.attempts[-1].resumed_update if self.attempts else 0
        return max(end, self.effective[-1].update if self.effective else 0)

    def effective_attempt(self, update: int) -> int | None:
        """Returns the number of the attempt whose line of that update counts; None where there is none."""
        newest = self.attempts[-1] if self.attempts else None
        if newest is not None and update > max(newest.resumed_update, newest.last_update or 0):
            return None
        return next((attempt.number for attempt in reversed(self.attempts) if attempt.covers(update)), None)


def build_timeline(events: list[Event], metrics: list[MetricsLine]) -> Timeline:
    """Sorts metrics lines into effective and superseded ones.

    An attempt whose `attempt_start` could not be read starts at its first metrics line.
    """
    starts = {event.attempt: event for event in events if event.key == EventKey.ATTEMPT_START.value}
    ends = {event.attempt: event for event in events if event.key == EventKey.ATTEMPT_END.value}
    lines: dict[int, list[MetricsLine]] = {}
    for line in metrics:
        lines.setdefault(line.attempt, []).append(line)
    times: dict[int, str] = {}
    for event in events:
        times[event.attempt] = event.time
    attempts = []
    for number in sorted(starts.keys() | lines.keys()):
        own = lines.get(number, [])
        start = starts.get(number)
        first = own[0].update - 1 if own else 0
        attempts.append(
            Attempt(
                number=number,
                resumed_update=first if start is None else start.update,
                last_update=own[-1].update if own else None,
                start=start,
                end=ends.get(number),
                last_time=times.get(number),
            )
        )
    timeline = Timeline(attempts, [], [])
    counts: dict[int, MetricsLine] = {}
    for line in metrics:
        # Of two lines of one attempt and update (an edited file) the last counts.
        if timeline.effective_attempt(line.update) == line.attempt:
            if line.update in counts:
                timeline.superseded.append(counts[line.update])
            counts[line.update] = line
        else:
            timeline.superseded.append(line)
    timeline.effective.extend(counts[update] for update in sorted(counts))
    return timeline
