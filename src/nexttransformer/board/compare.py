"""Data of the comparison page; its script does the rest."""

from collections.abc import Sequence
from typing import Any

from nexttransformer.board.method_page import clipped
from nexttransformer.board.rank import REFERENCE_METHOD
from nexttransformer.board.records import Record
from nexttransformer.reporting import noise


def compare_data(records: Sequence[Record], published: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """Returns what the comparison page's script needs."""
    entries = [
        {
            "id": record.method,
            "name": record.name if record.is_ranked else f"{record.name} ({record.facts.track})",
            "bpb": record.bpb,
            "core": None if record.core_v1 is None else 100 * record.core_v1,
            "core_v2": None if record.core_v2 is None else 100 * record.core_v2,
            "parameters": record.facts.model.num_parameters,
            "flops": record.facts.model.training_flops_per_token,
            "speed": record.tokens_per_second,
            "curve": clipped(record.bpb_curve),
            "tasks": [[task.label, task.num_correct / task.rows] for task in record.tasks if task.rows],
        }
        for record in records
    ]
    for item in sorted(published["results"], key=lambda item: (item["bpb"], item["method"])):
        entries.append(
            {
                "id": f"published_{item['method']}",
                "name": f"{item['name']} ({words['not_audited']})",
                "bpb": item["bpb"],
                "core": 100 * item["core"],
                "core_v2": None,
                "parameters": item["num_parameters"],
                "flops": None,
                "speed": None,
                "curve": [],
                "tasks": [],
            }
        )
    keys = (
        "verdict_better",
        "verdict_tie",
        "verdict_same",
        "quantity",
        "compare_difference",
        "parameters",
        "flops",
        "speed",
    )
    keys += ("curve", "curve_difference", "updates", "bpb_unit", "tasks", "task", "tie", "band_note")
    # At first: the reference against the best other result.
    ids = [entry["id"] for entry in entries]
    first = REFERENCE_METHOD if REFERENCE_METHOD in ids else ids[0]
    ranked = [record.method for record in records if record.is_ranked and record.method != first]
    second = ranked[0] if ranked else next(each for each in ids if each != first)
    return {
        "entries": entries,
        "first": first,
        "second": second,
        "bpb_band": noise.BPB_BAND,
        "core_band": 100 * noise.CORE_BAND,
        "words": {key: words[key] for key in keys},
    }
