"""Rows of the board's tables, all text already formatted."""

from collections.abc import Sequence
from typing import Any

from nexttransformer.board.methods import MethodText
from nexttransformer.board.rank import REFERENCE_METHOD, Ranked, Timed, rank_by_bpb, reference_of
from nexttransformer.board.records import FORMAL, Record
from nexttransformer.reporting import formats, noise

APPROXIMATELY = "\u2248"


def rank_text(row: Ranked) -> str:
    """Returns a rank, or the range of ranks that noise leaves open."""
    return str(row.best) if row.best == row.worst else f"{row.best}\u2013{row.worst}"


def core_text(record: Record, words: dict[str, str]) -> str:
    """Returns CORE x 100, marked where it is a mean over limited rows."""
    if record.core_v1 is not None:
        return formats.points(record.core_v1)
    limited = record.core_limited
    return formats.NOTHING if limited is None else f"{formats.points(limited)} ({words['core_limited']})"


def _common(record: Record, texts: dict[str, MethodText], words: dict[str, str]) -> dict[str, Any]:
    """What every table shows of a record; `*_key` are sorting keys."""
    core = record.core_v1 if record.core_v1 is not None else record.core_limited
    return {
        "method": record.method,
        "name": record.name,
        "family": record.family,
        "track": record.facts.track,
        "bpb": formats.decimals(record.bpb, 4),
        "bpb_key": record.bpb,
        "core": core_text(record, words),
        "core_key": core if core is not None else -1,
        "core_v2": formats.points(record.core_v2),
        "core_v2_key": record.core_v2 if record.core_v2 is not None else -1,
        "parameters": formats.millions(record.facts.model.num_parameters),
        "parameters_key": record.facts.model.num_parameters,
        "flops": formats.short(record.facts.model.training_flops_per_token, 4),
        "flops_key": record.facts.model.training_flops_per_token,
        "speed": formats.short(record.tokens_per_second),
        "speed_key": record.tokens_per_second,
        "config": f"{record.family}/{record.method}.json" if record.method in texts else None,
    }


def ranking_rows(
    ranked: Sequence[Ranked], division: str, texts: dict[str, MethodText], words: dict[str, str]
) -> list[dict[str, Any]]:
    """Returns the rows of the main table; `strip` places a result and its noise on a common scale from 0 to 1."""
    scores = [row.record.bpb for row in ranked]
    noise_band = noise.BPB_BAND if division == FORMAL else 0.0
    low = min(scores, default=0.0) - noise_band
    span = (max(scores, default=1.0) + noise_band - low) or 1.0
    rows = []
    for place, row in enumerate(ranked):
        is_reference = row.record.method == REFERENCE_METHOD
        difference = words["reference"] if is_reference else formats.signed(row.difference, 4)
        if row.is_tie_with_reference and not is_reference and division == FORMAL:
            difference = f"{APPROXIMATELY} {difference}"
        rows.append(
            {
                **_common(row.record, texts, words),
                "rank": rank_text(row),
                "rank_key": place,
                "ties": ", ".join(row.ties),
                "difference": difference,
                "difference_key": row.difference or 0,
                "is_better": row.difference is not None and row.difference < 0 and not row.is_tie_with_reference,
                "strip": {
                    "from": (row.record.bpb - noise_band / 2 - low) / span,
                    "to": (row.record.bpb + noise_band / 2 - low) / span,
                    "at": (row.record.bpb - low) / span,
                },
            }
        )
    return rows


def other_rows(records: Sequence[Record], texts: dict[str, MethodText], words: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the results of tracks that are not ranked."""
    return [_common(record, texts, words) for record in records if not record.is_ranked]


def family_rows(records: Sequence[Record], words: dict[str, str]) -> list[dict[str, Any]]:
    """Returns one row for each family, best family first."""
    reference = reference_of(records)
    families: dict[str, list[Record]] = {}
    for row in rank_by_bpb(records):
        families.setdefault(row.record.family, []).append(row.record)
    rows = []
    for family, members in families.items():
        best = members[0]
        difference = None if reference is None else best.bpb - reference.bpb
        rows.append(
            {
                "family": family,
                "count": len(members),
                "best": best.name,
                "best_method": best.method,
                "bpb": formats.decimals(best.bpb, 4),
                "core": core_text(best, words),
                "difference": words["reference"] if best is reference else formats.signed(difference, 4),
            }
        )
    return rows


def time_rows(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Returns the ranking by wall-clock; empty without any figure."""
    return [
        {
            "method": row.record.method,
            "name": row.record.name,
            "gpu": row.gpu,
            "speed": formats.count(row.tokens_per_second_per_gpu),
            "slowdown": formats.NOTHING if row.slowdown is None else f"{row.slowdown:.2f} x",
            "bpb": formats.decimals(row.record.bpb, 4),
            "equal_time": formats.decimals(row.bpb_at_equal_time, 4),
        }
        for row in timed
    ]


def published_rows(published: dict[str, Any], texts: dict[str, MethodText]) -> list[dict[str, Any]]:
    """Returns the reference rows from elsewhere, by BPB."""
    results = sorted(published["results"], key=lambda item: (item["bpb"], item["method"]))
    return [
        {
            "method": item["method"],
            "name": item["name"],
            "family": item["family"],
            "parameters": formats.count(item["num_parameters"]),
            "bpb": formats.decimals(item["bpb"], 4),
            "core": formats.points(item["core"]),
            "has_page": item["method"] in texts,
        }
        for item in results
    ]
