"""Evidence folders with invented records, written by the field list of the record's specification."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from tests.reporting.synthetic import LABELS
from tests.training.run_helpers import sha

DIGESTS = (
    "config source parts manifest tokenizer byte_table data_order val_curve val_final core_bundle weights complete run "
    "audit"
).split()


def make_record(
    method: str,
    *,
    bpb: float,
    core: float | None = 0.33,
    family: str = "baseline",
    protocol: str = "formal-v1",
    **changes: Any,
) -> dict[str, Any]:
    """Returns a record; `changes` replace top-level fields."""
    last = 46_875 if protocol == "formal-v1" else 140
    every = 625 if protocol == "formal-v1" else 20
    curve = [[update, bpb + 2.2 * math.exp(-update * 8 / last)] for update in range(0, last, every)] + [[last, bpb]]
    tasks = [
        {
            "label": label,
            "num_correct": 300 + 10 * index + len(method),
            "rows": 1000,
            "centered_v1": (0.05 + 0.01 * index) / 0.75,
            "centered_v2": (0.05 + 0.01 * index) / 0.75,
        }
        for index, label in enumerate(LABELS)
    ]
    core_curve = []
    for step in range(1, 16):
        value = None if core is None else core * (1 - math.exp(-step / 4))
        core_curve.append([last * step // 15, value, None if value is None else value - 0.023])
    core_curve[-1] = [last, core, None if core is None else core - 0.023]
    return {
        "schema": "nexttransformer.record/1",
        "division": "formal" if protocol == "formal-v1" else "demo",
        "method": method,
        "family": family,
        "display_name": method.replace("_", " ").title(),
        "track": "main",
        "protocol": {"id": protocol, "digest": sha(protocol)},
        "package_version": "0.1.0",
        "commit": "a" * 40,
        "run_id": sha(method + protocol)[:16],
        "model": {
            "num_parameters": 1_355_810_568,
            "num_lookup": 654_311_424,
            "num_matmul": 701_499_096,
            "training_flops_per_token": 4_643_317_008,
            "flops_ratio": 1.0044,
            "matmul_ratio": 1.0,
            "decode_state_bytes": 289_406_976,
        },
        "training": {
            "num_updates": last,
            "tokens": 49_152_000_000,
            "seed": 42,
            "attempts": [
                {
                    "attempt": 0,
                    "world_size": 8,
                    "num_nodes": 1,
                    "micro_batch": 16,
                    "gpus": {"NVIDIA H200": 8},
                    "first_update": 0,
                    "last_update": last,
                }
            ],
            "gpu_hours": 260.5,
            "median_tokens_per_second": 1_200_000.0 if method == "dense_full" else 1_000_000.0,
            "versions": {"torch": "2.12.0", "python": "3.12.3"},
        },
        "results": {
            "bpb_final": {"bpb": bpb, "nats": 1.0, "nats_hex": "0x1p+0", "bytes": 1, "tokens_counted": 1},
            "bpb_curve": curve,
            "core": {
                "curve": core_curve,
                "core_limited": 0.2067 if core is None else None,
                "tasks": tasks,
            },
        },
        "digests": {
            **{key: sha(method + key) for key in DIGESTS},
            "data_chain": "0" * 16,
            "package": {"model.safetensors": sha("model")},
        },
        "audit": {"verdict": "pass", "num_warnings": 1, "num_waivers": 0, "warning_ids": ["T5"]},
        "supersedes": None,
        "authors": ["A. Author"],
        "licence": "Apache-2.0",
        "citation": None,
        "links": [{"title": "Paper", "url": "https://example.org/paper"}],
        **changes,
    }


def write_record(evidence: Path, record: dict[str, Any], *, verdict: str = "pass", run_id: str | None = None) -> Path:
    """Writes record and audit into the division's folders; returns the record's file."""
    inside = evidence / "demo" if record["division"] == "demo" else evidence
    audit = {
        "schema": "nexttransformer.audit/1",
        "method": record["method"],
        "run_id": run_id or record["run_id"],
        "verdict": verdict,
    }
    content = json.dumps(audit).encode()
    record = {**record, "digests": {**record["digests"], "audit": hashlib.sha256(content).hexdigest()}}
    for name, data in (("runs", json.dumps(record).encode()), ("audits", content)):
        (inside / name).mkdir(parents=True, exist_ok=True)
        (inside / name / f"{record['method']}.json").write_bytes(data)
    return inside / "runs" / f"{record['method']}.json"


def write_board(evidence: Path) -> Path:
    """Writes seven formal records (two of them ties), one of another track, and two demo records."""
    for method, family, bpb, core in (
        ("dense_full", "baseline", 0.6672, 0.3310),
        ("sssl", "baseline", 0.6671, 0.3378),
        ("hc", "residual", 0.6644, 0.3509),
        ("simple_hc", "residual", 0.6628, 0.3511),
        ("mhc", "residual", 0.6617, 0.3533),
        ("gdn", "linear", 0.6690, 0.3250),
        ("gdn_hybrid", "hybrid", 0.6641, 0.3460),
    ):
        write_record(evidence, make_record(method, bpb=bpb, core=core, family=family))
    memory = make_record("engram", bpb=0.6600, family="memory", track="memory")
    write_record(evidence, memory)
    for method, bpb in (("dense_full", 2.0431), ("mhc_lite", 2.0212)):
        family = "baseline" if method == "dense_full" else "residual"
        record = make_record(method, bpb=bpb, core=None, family=family, protocol="demo-v1")
        write_record(evidence, record)
    return evidence
