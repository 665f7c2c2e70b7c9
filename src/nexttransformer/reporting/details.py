"""What the report says of a run in detail: CORE tasks, evaluations, attempts, events, environment, digests."""

from collections import Counter
from typing import Any

from nexttransformer.reporting import formats
from nexttransformer.reporting.evaluations import CURVE_SPLIT, FINAL_SPLIT
from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.summary import Row, core_text
from nexttransformer.reporting.tolerant import dig
from nexttransformer.training.events import Event, EventKey

_NOTABLE = (
    EventKey.CHECKPOINT_SKIPPED,
    EventKey.SAVE_FAILED,
    EventKey.STOP_REQUESTED,
    EventKey.NONFINITE,
    EventKey.SPIKE,
    EventKey.RECOMPILE,
    EventKey.FALLBACK,
    EventKey.SETTING_IGNORED,
)
_MAX_NOTABLE = 50
_VERSIONS = ("package", "python", "torch", "cuda", "nccl", "driver", "triton", "fla", "accelerate")
_DATA = ("manifest", "tokenizer", "byte_table", "data_order", "val_curve", "val_final", "core_bundle")


def core_rows(runs: list[RunView], words: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the CORE table: rows, shots and chance level of each task, and each run's scores."""
    tables = [{task.label: task for task in run.core.tasks} if run.core else {} for run in runs]
    labels = list(dict.fromkeys(label for table in tables for label in table))
    rows = []
    for label in labels:
        cells = []
        for table in tables:
            task = table.get(label)
            cells.append(
                {
                    "accuracy": formats.percent(task.accuracy if task else None),
                    "fraction": task.accuracy if task and task.accuracy is not None else None,
                    "correct": formats.NOTHING
                    if task is None or task.num_correct is None
                    else f"{task.num_correct:,} / {task.rows:,}",
                    "centered_v1": formats.points(task.centered_v1 if task else None),
                    "centered_v2": formats.points(task.centered_v2 if task else None),
                    "error": task.error if task else None,
                }
            )
        known = next(table[label] for table in tables if label in table)
        chance = None if known.baseline_v1 is None else known.baseline_v1 / 100
        rows.append({"label": label, "rows": known.rows, "shots": known.num_fewshot, "chance": chance, "cells": cells})
    return rows


def evaluation_rows(run: RunView, words: dict[str, str]) -> list[dict[str, str]]:
    """Returns the evaluations table, oldest first."""
    rows = []
    for item in run.evaluations:
        value, note = core_text(item, words) if item.kind != "val_curve" else (formats.NOTHING, "")
        if item.core_v1 is None and item.has_core:
            value, note = f"{value} ({note})", formats.NOTHING
        rows.append(
            {
                "update_number": formats.count(item.update),
                "tokens": formats.short(item.update * run.tokens_per_update),
                "kind": words[f"evaluation_{item.kind}"],
                "curve": formats.decimals(item.bpb.get(CURVE_SPLIT), 6),
                "final": formats.decimals(item.bpb.get(FINAL_SPLIT), 6),
                "core_v1": value,
                "core_v2": formats.points(item.core_v2),
                "seconds": formats.seconds(item.seconds),
                "errors": " ".join(item.errors),
            }
        )
    return rows


def attempt_rows(run: RunView, words: dict[str, str]) -> list[dict[str, str]]:
    """Returns the attempts table."""
    superseded = Counter(line.attempt for line in run.timeline.superseded)
    rows = []
    for item in run.timeline.attempts:
        meta = item.start.meta if item.start else {}
        gpus = dig(meta, "gpus", dict) or {}
        if item.end is not None:
            reason = dig(item.end.meta, "reason", str)
            outcome = words.get(f"outcome_{item.end.value}", str(item.end.value)) + (f" ({reason})" if reason else "")
        elif item is run.timeline.attempts[-1] and run.status == "running":
            outcome = words["status_running"]
        else:
            outcome = words["outcome_none"]
        first = item.resumed_update + 1
        rows.append(
            {
                "number": str(item.number),
                "start": formats.moment(item.start.time if item.start else None),
                "resumed": dig(meta, "resumed_from", str) or words["from_start"],
                "updates": formats.NOTHING if item.last_update is None else f"{first:,} \u2013 {item.last_update:,}",
                "superseded": formats.count(superseded[item.number]),
                "world": formats.count(dig(meta, "world_size", int)),
                "nodes": formats.count(dig(meta, "num_nodes", int)),
                "gpus": ", ".join(f"{number} x {name}" for name, number in sorted(gpus.items())) or formats.NOTHING,
                "micro_batch": formats.count(dig(meta, "micro_batch", int)),
                "outcome": outcome,
            }
        )
    return rows


def notable_events(run: RunView) -> tuple[list[dict[str, str]], int]:
    """Returns events a person should see (the first 50), and how many there are."""
    keys = {key.value for key in _NOTABLE}
    found = [event for event in run.events if event.key in keys]
    return [_event_row(event) for event in found[:_MAX_NOTABLE]], len(found)


def _event_row(event: Event) -> dict[str, str]:
    details = ", ".join(f"{key} {_plain(value)}" for key, value in event.meta.items())
    return {
        "time": formats.moment(event.time),
        "update_number": formats.count(event.update),
        "key": event.key,
        "text": f"{_plain(event.value)}{': ' if details else ''}{details}",
    }


def _plain(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def environment(run: RunView, words: dict[str, str]) -> list[Row]:
    """Returns versions (every value that occurred over the attempts), code and run identity."""
    rows: list[Row] = []
    for name in _VERSIONS:
        values = [
            dig(item.start.meta, f"versions.{name}", str) for item in run.timeline.attempts if item.start is not None
        ]
        shown = ", ".join(dict.fromkeys(value for value in values if value))
        if shown:
            rows.append((name, shown))
    commit = dig(run.facts, "code.commit", str)
    is_clean = dig(run.facts, "code.is_clean", bool)
    rows += [
        (words["commit"], f"{commit or formats.NOTHING} ({words['clean'] if is_clean else words['dirty']})"),
        (words["source_digest"], dig(run.facts, "code.source_digest", str) or formats.NOTHING),
        (words["run_id"], dig(run.facts, "run_id", str) or formats.NOTHING),
        (words["created"], formats.moment(dig(run.facts, "created", str))),
        (words["precision"], dig(run.facts, "precision_policy", str) or formats.NOTHING),
        (words["seed"], formats.count(dig(run.facts, "seed", int))),
    ]
    return rows


def digests(run: RunView, words: dict[str, str]) -> list[Row]:
    """Returns the data digests, with the configuration's and the protocol's."""
    rows = [(name, dig(run.facts, f"data.{name}", str) or formats.NOTHING) for name in _DATA]
    config = dig(run.facts, "config_digest", str) or formats.NOTHING
    protocol = dig(run.facts, "protocol.digest", str) or formats.NOTHING
    return [*rows, (words["config"], config), (words["protocol"], protocol)]


def optimizer_rows(run: RunView) -> list[dict[str, str]]:
    """Returns the optimizer groups."""
    rows = []
    for group in dig(run.facts, "optimizer_groups", list) or []:
        betas = dig(group, "betas", list)
        momentum = dig(group, "momentum", float)
        decay = dig(group, "weight_decay", float)
        rate = dig(group, "learning_rate", float)
        rows.append(
            {
                "name": dig(group, "name", str) or formats.NOTHING,
                "optimizer": dig(group, "optimizer", str) or formats.NOTHING,
                "parameters": formats.count(dig(group, "num_parameters", int)),
                "rate": formats.NOTHING if rate is None else f"{rate:.6g}",
                "momentum": ", ".join(map(str, betas)) if betas else f"{momentum}" if momentum else formats.NOTHING,
                "decay": formats.NOTHING if decay is None else f"{decay:.6g}",
            }
        )
    return rows
