"""Attempts and the effective timeline: which line of the metrics counts for each update."""

from dataclasses import dataclass

import numpy as np

from nexttransformer.audit.check import Needs
from nexttransformer.audit.event_schema import AttemptStart
from nexttransformer.audit.logs import EventLog, LoggedEvent, Metrics
from nexttransformer.training.events import EventKey

NONE = -1


@dataclass(frozen=True)
class Attempt:
    """One launch: it covers the updates after `first` (`resumed_update`) up to `last` (its last metrics line)."""

    number: int
    start: LoggedEvent
    meta: AttemptStart
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """The effective history of a run.

    Attributes:
        attempts: by number.
        num_updates: updates that a complete run has.
        attempt_of: [num_updates + 1] the attempt that counts for each update (-1: none); at 0 the last
            one that started there.
        line_of: [num_updates + 1] index of the metrics line that counts (-1: none); unused at 0.
        superseded: indices of lines that do not count.
    """

    attempts: dict[int, Attempt]
    num_updates: int
    attempt_of: np.ndarray
    line_of: np.ndarray
    superseded: np.ndarray

    @property
    def lines(self) -> np.ndarray:
        """Indices of the lines that count, in the order of updates."""
        return self.line_of[1:][self.line_of[1:] != NONE]

    @property
    def missing(self) -> np.ndarray:
        """Updates without a line."""
        return 1 + np.flatnonzero(self.line_of[1:] == NONE)

    def effective_attempt(self, update: int) -> int:
        """Returns the attempt that counts for an update, -1 for none."""
        return int(self.attempt_of[update]) if 0 <= update <= self.num_updates else NONE


def build_timeline(events: EventLog, metrics: Metrics, num_updates: int) -> Timeline:
    """Returns the effective timeline.

    Raises:
        Needs: an attempt's start is malformed, or there is none.
    """
    attempts: dict[int, Attempt] = {}
    order = np.argsort(metrics.attempt, kind="stable")
    numbers, starts = np.unique(metrics.attempt[order], return_index=True)
    groups = dict(zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}
    for logged in events.of(EventKey.ATTEMPT_START):
        if not isinstance(logged.meta, AttemptStart):
            raise Needs("Needs the start of an attempt, which is malformed; see L4.", logged.where)
        number, first = logged.event.attempt, logged.meta.resumed_update
        own = groups.get(number)
        last = first if own is None else int(metrics.update[own[-1]])
        attempts[number] = Attempt(number, logged, logged.meta, first, last)
    if not attempts:
        raise Needs("Needs the start of an attempt, and there is none.", "events.jsonl")
    attempts = dict(sorted(attempts.items()))
    attempt_of = np.full(num_updates + 1, NONE, dtype=np.int64)
    for attempt in attempts.values():
        attempt_of[min(attempt.first, num_updates) + 1 : min(attempt.last, num_updates) + 1] = attempt.number
        if attempt.first == 0:
            attempt_of[0] = attempt.number
    line_of = np.full(num_updates + 1, NONE, dtype=np.int64)
    inside = np.flatnonzero((metrics.update >= 1) & (metrics.update <= num_updates))
    effective = inside[attempt_of[metrics.update[inside]] == metrics.attempt[inside]]
    line_of[metrics.update[effective]] = effective
    superseded = np.setdiff1d(np.arange(len(metrics)), line_of[line_of != NONE])
    return Timeline(attempts, num_updates, attempt_of, line_of, superseded)
