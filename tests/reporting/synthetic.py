"""Run folders written through the real writers, with invented numbers."""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.protocol import get_protocol
from nexttransformer.training.events import EventKey, EventWriter
from nexttransformer.training.metrics import MetricsLine, MetricsWriter
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunState
from tests.training.run_helpers import RUN_ID, make_record, sha

LABELS = (
    "hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa openbook_qa "
    "lambada_openai hellaswag winograd winogrande bigbench_dyck_languages agi_eval_lsat_ar bigbench_cs_algorithms "
    "bigbench_operators bigbench_repeat_copy_logic squad coqa boolq bigbench_language_identification"
).split()


@dataclass(frozen=True)
class Launch:
    """One attempt: updates (resumed, last], and how it ends ("killed" writes no end)."""

    resumed: int
    last: int
    end: str = "stopped"


def loss(update: int, shift: float = 0.0) -> float:
    """Nats per token of an update, before noise."""
    return 2.6 + 7.8 * math.exp(-update / 400) + 2.2 / (1 + update / 900) ** 0.5 + shift


def line(update: int, attempt: int, tokens: int, *, noise: float = 0.0, shift: float = 0.0) -> MetricsLine:
    """One metrics line."""
    return MetricsLine(
        attempt=attempt,
        update=update,
        loss_nats=loss(update, shift) + noise,
        gradient_norm=0.4 + abs(noise),
        learning_rates=[0.02 / update, 0.008 / update],
        muon_momentum=0.95,
        muon_weight_decay=0.1,
        rows=512,
        tokens=tokens,
        tokens_seen=tokens * update,
        rows_hash="0" * 16,
        data_chain="1" * 16,
        seconds=0.5,
        tokens_per_second=tokens / 0.5 * (1 + noise / 10),
        mfu_fraction=0.47,
        peak_memory_bytes=70 * 2**30,
    )


def evaluation(kind: str, update: int, *, bpb: float = 0.0, core: float | None = None, limited: bool = False) -> Any:
    """The content of an evaluation file, as far as pages read it."""
    splits = {"val_curve": ["val_curve"], "final": ["val_curve", "val_final"]}.get(kind, [])
    tasks = [
        {
            "label": label,
            "rows": 1000,
            "num_fewshot": 10,
            "num_correct": 300 + 10 * index,
            "accuracy": 0.3 + 0.01 * index,
            "baseline_v1": 25,
            "centered_v1": (0.05 + 0.01 * index) / 0.75,
            "centered_v2": (0.05 + 0.01 * index) / 0.75,
            "error": None,
        }
        for index, label in enumerate(LABELS)
    ]
    scores = {"core_v1": None, "core_v2": None, "core_limited": core}
    if not limited:
        scores = {"core_v1": core, "core_v2": None if core is None else core - 0.023, "core_limited": None}
    return {
        "schema": "nexttransformer.evaluation/1",
        "kind": kind,
        "update": update,
        "bpb": {split: {"bpb": bpb + 0.004 * (split == "val_final")} for split in splits},
        "core": None if core is None else {**scores, "tasks": tasks},
        "errors": [],
    }


def write_run(
    root: Path,
    launches: list[Launch],
    *,
    protocol_id: str = "test-v1",
    num_updates: int = 20,
    status: str = "finished",
    bpb_every: int = 5,
    shift: float = 0.0,
    run_id: str = RUN_ID,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Writes a run folder and returns it. `shift` moves its losses and BPB."""
    protocol = get_protocol(protocol_id)
    tokens = protocol.tokens_per_update
    described = {"id": protocol_id, "digest": protocol.digest, "constants": protocol.constants()}
    record = make_record(run_id=run_id, num_updates=num_updates, protocol=described, **changes)
    folder = RunFolder(root)
    folder.create(record)
    generator = random.Random(seed)
    for attempt, launch in enumerate(launches):
        events, metrics = EventWriter(folder.events, attempt), MetricsWriter(folder.metrics)
        meta = {
            "mode": record.mode,
            "resumed_from": f"checkpoint_{launch.resumed:08d}" if launch.resumed else None,
            "resumed_update": launch.resumed,
            "world_size": 8,
            "num_nodes": 1,
            "micro_batch": 16,
            "gpus": {"NVIDIA H200": 8},
            "versions": {"python": "3.12.3", "torch": "2.12.0", "cuda": "12.9", "package": "0.1.0", "triton": None},
        }
        events.write(EventKey.ATTEMPT_START, attempt, meta, update=launch.resumed)
        for update in range(launch.resumed, launch.last + 1):
            if update > launch.resumed:
                noise = generator.gauss(0, 0.03)
                metrics.write(line(update, attempt, tokens, noise=noise, shift=shift))
            is_due = update % bpb_every == 0 or update == num_updates
            if is_due and (update > launch.resumed or update == 0):
                score = loss(max(update, 1), shift) / 4.3
                _write_evaluation(folder, events, evaluation("val_curve", update, bpb=score))
        if launch.end != "killed":
            events.write(EventKey.ATTEMPT_END, launch.end, {"reason": "stop_requested"}, update=launch.last)
        if launch is launches[-1] and status == "finished":
            score = loss(num_updates, shift) / 4.3
            is_limited = protocol.core_bundle != "core"
            core = evaluation("core", num_updates, core=0.331 - shift, limited=is_limited)
            _write_evaluation(folder, events, core)
            _write_evaluation(folder, events, evaluation("final", num_updates, bpb=score))
            events.write(EventKey.RUN_END, "finished", {}, update=num_updates)
        events.close()
        metrics.close()
    state = RunState(
        status=status,  # type: ignore[arg-type]
        update=launches[-1].last,
        attempt=len(launches) - 1,
        newest_checkpoint=None,
        reason=None,
        num_attempts_without_progress=0,
    )
    folder.write_state(state)
    return root


def _write_evaluation(folder: RunFolder, events: EventWriter, value: Any) -> None:
    kind, update = value["kind"], value["update"]
    path = folder.evaluation(kind, update)
    jsonio.write_json_atomic(path, value)
    split = "val_final" if kind == "final" else "val_curve"
    meta = {"file": f"evaluations/{path.name}", "file_digest": sha(path.name), "seconds": 12.5}
    if kind == "core":
        meta["core_v1"] = value["core"]["core_v1"]
    else:
        meta["bpb"] = value["bpb"][split]["bpb"]
    events.write(EventKey.EVALUATION, kind, meta, update=update)
