"""Order of the results: rank ranges that respect noise, ties, differences to the reference, second ranking by time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nexttransformer.board.records import FORMAL, Record
from nexttransformer.reporting.noise import is_bpb_tie

REFERENCE_METHOD = "dense_full"


@dataclass(frozen=True)
class Ranked:
    """One row of a ranking by BPB.

    Attributes:
        record: the result.
        best, worst: ranks it may have given the noise: one more than the number of results that are distinguishably
            better, and the number of results that are not distinguishably worse.
        ties: methods it cannot be told apart from.
        difference: BPB minus the reference's, None without a reference.
        is_tie_with_reference: whether that difference is within the noise band.
    """

    record: Record
    best: int
    worst: int
    ties: tuple[str, ...]
    difference: float | None
    is_tie_with_reference: bool


@dataclass(frozen=True)
class Timed:
    """One row of the ranking by wall-clock. `slowdown` is time per token over the reference's on the same GPU."""

    record: Record
    gpu: str
    tokens_per_second_per_gpu: float
    slowdown: float | None
    bpb_at_equal_time: float | None


def rank_by_bpb(records: Sequence[Record]) -> list[Ranked]:
    """Orders the records of one division by BPB; only ranked tracks take part.

    Two results of the formal division whose BPB differs by less than the noise band share their ranks. How noisy
    the demo division is is unknown, so there only equal values are ties.
    """
    taking_part = sorted((item for item in records if item.is_ranked), key=lambda item: (item.bpb, item.method))
    reference = reference_of(records)
    rows = []
    for record in taking_part:
        ties = [other for other in taking_part if other is not record and _is_tie(record, other)]
        better = sum(other.bpb < record.bpb and not _is_tie(record, other) for other in taking_part)
        difference = None if reference is None else record.bpb - reference.bpb
        rows.append(
            Ranked(
                record=record,
                best=better + 1,
                worst=better + 1 + len(ties),
                ties=tuple(other.method for other in ties),
                difference=difference,
                is_tie_with_reference=reference is not None and _is_tie(record, reference),
            )
        )
    return rows


def reference_of(records: Sequence[Record]) -> Record | None:
    """Returns the dense baseline's record."""
    return next((record for record in records if record.method == REFERENCE_METHOD), None)


def _is_tie(first: Record, second: Record) -> bool:
    return is_bpb_tie(first.bpb, second.bpb) if first.division == FORMAL else first.bpb == second.bpb


def rank_by_time(records: Sequence[Record], beta_bpb: float | None) -> list[Timed]:
    """Orders ranked records by BPB at equal time, BPB + beta log2(slowdown), and before beta is known by speed.

    Args:
        records: of one division.
        beta_bpb: BPB gained per doubling of training compute, or None.
    """
    reference = reference_of(records)
    base = reference.tokens_per_second_per_gpu if reference else None
    rows = []
    for record in records:
        speed = record.tokens_per_second_per_gpu
        if not record.is_ranked or speed is None or speed[1] <= 0:
            continue
        slowdown = base[1] / speed[1] if base is not None and base[0] == speed[0] else None
        at_equal_time = None
        if slowdown is not None and beta_bpb is not None:
            at_equal_time = record.bpb + beta_bpb * math.log2(slowdown)
        rows.append(Timed(record, speed[0], speed[1], slowdown, at_equal_time))

    def order(row: Timed) -> tuple[float, float, str]:
        value = row.slowdown if row.bpb_at_equal_time is None else row.bpb_at_equal_time
        return (math.inf if value is None else value, -row.tokens_per_second_per_gpu, row.record.method)

    return sorted(rows, key=order)
