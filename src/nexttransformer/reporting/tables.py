"""What the template shows of runs besides curves: key figures, comparison, attempts, evaluations, environment."""

from collections import Counter
from typing import Any

from nexttransformer.reporting import formats, noise
from nexttransformer.reporting.evaluations import CURVE_SPLIT, FINAL_SPLIT, Evaluation
from nexttransformer.reporting.figures import NOISE_KNOWN
from nexttransformer.reporting.run_view import RunView
from nexttransformer.reporting.series import half_life, median, smooth
from nexttransformer.reporting.tolerant import dig
from nexttransformer.training.events import Event, EventKey

Row = tuple[str, str]
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


def group_names(run: RunView) -> list[str]:
    """Names of the optimizer groups in the order of `learning_rates`."""
    groups = dig(run.facts, "optimizer_groups", list) or []
    return [dig(group, "name", str) or f"group {index}" for index, group in enumerate(groups)]


def last_loss(run: RunView) -> float | None:
    """Smoothed training loss of the last update, nats per token."""
    losses = [line.loss_nats for line in run.timeline.effective]
    return smooth(losses, half_life(len(losses)))[-1] if losses else None


def core_text(evaluation: Evaluation | None, words: dict[str, str]) -> Row:
    """Returns CORE x 100 and its remark: v2, or that it is a mean over an excerpt."""
    if evaluation is None or not evaluation.has_core:
        return formats.NOTHING, ""
    if evaluation.core_v1 is not None:
        return formats.points(evaluation.core_v1), f"core_v2 {formats.points(evaluation.core_v2)}"
    return formats.points(evaluation.core_limited), words["core_limited"]


def key_figures(run: RunView, words: dict[str, str]) -> list[tuple[str, str, str]]:
    """Returns the cards on top of a run: label, value, remark."""
    lines = run.timeline.effective
    curve = run.bpb_curve
    curve_text = f"val_curve {formats.decimals(curve[-1][1], 4)}" if curve else ""
    final = run.bpb_final
    core_value, core_note = core_text(run.core, words)
    last = run.last_update
    tokens = lines[-1].tokens_seen if lines else None
    remaining = ""
    if run.status == "running" and last and lines:
        speed = median([line.seconds for line in lines[-50:]]) or 0.0
        remaining = ", " + words["left"].format(time=formats.seconds((last - lines[-1].update) * speed))
    unit = words["gpu_hours"] if run.has_gpu else words["process_hours"]
    mfu = run.mfu_fraction
    memory = run.peak_memory_bytes
    return [
        (
            words["bpb_final"] if final is not None else words["bpb_curve"],
            formats.decimals(final if final is not None else (curve[-1][1] if curve else None), 4),
            curve_text if final is not None else (words["at_update"].format(update=curve[-1][0]) if curve else ""),
        ),
        ("CORE", core_value, core_note),
        (words["loss"], formats.decimals(last_loss(run), 4), words["loss_note"]),
        (
            words["updates"],
            formats.count(run.timeline.last_update),
            words["updates_note"].format(last=formats.count(last), tokens=formats.short(tokens)) + remaining,
        ),
        (
            words["speed"],
            formats.count(run.tokens_per_second),
            f"MFU {formats.percent(mfu)}" if mfu is not None else words["tokens_per_second"],
        ),
        (
            unit,
            formats.hours(run.device_hours),
            words["peak_memory"].format(bytes=formats.data_bytes(memory)) if memory else words["training_only"],
        ),
        (
            words["parameters"],
            formats.short(dig(run.facts, "model.num_parameters", int)),
            words["flops"].format(flops=formats.short(dig(run.facts, "model.training_flops_per_token", int))),
        ),
    ]


def comparison(runs: list[RunView], words: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Returns the rows of the table that compares several runs; the first is the reference of differences."""
    first = runs[0].bpb_final
    known = {run.protocol.id if run.protocol else None for run in runs}

    def difference(run: RunView) -> str:
        if run is runs[0]:
            return words["reference"]
        if len(known) > 1 or first is None or run.bpb_final is None:
            return formats.NOTHING
        text = formats.signed(run.bpb_final - first, 4)
        is_tie = known <= set(NOISE_KNOWN) and noise.is_bpb_tie(first, run.bpb_final)
        return f"{text} ({words['tie']})" if is_tie else text

    def core(run: RunView) -> str:
        value, note = core_text(run.core, words)
        return f"{value} ({note})" if note and run.core and run.core.core_v1 is None else value

    def number(path: str) -> list[str]:
        return [formats.count(dig(run.facts, path, int)) for run in runs]

    return [
        (words["method"], [dig(run.facts, "method", str) or formats.NOTHING for run in runs]),
        (words["protocol"], [dig(run.facts, "protocol.id", str) or formats.NOTHING for run in runs]),
        (words["kind"], [words.get(f"mode_{dig(run.facts, 'mode', str)}", formats.NOTHING) for run in runs]),
        (words["status"], [words[f"status_{run.status}"] for run in runs]),
        (words["bpb_final"], [formats.decimals(run.bpb_final, 4) for run in runs]),
        (words["difference"], [difference(run) for run in runs]),
        (words["bpb_curve"], [formats.decimals(run.bpb_curve[-1][1] if run.bpb_curve else None, 4) for run in runs]),
        ("CORE", [core(run) for run in runs]),
        (words["loss"], [formats.decimals(last_loss(run), 4) for run in runs]),
        (
            words["updates"],
            [f"{formats.count(run.timeline.last_update)} / {formats.count(run.last_update)}" for run in runs],
        ),
        (words["parameters"], number("model.num_parameters")),
        (words["flops_row"], number("model.training_flops_per_token")),
        (words["speed_row"], [formats.count(run.tokens_per_second) for run in runs]),
        (words["hours_row"], [formats.hours(run.device_hours) for run in runs]),
        (words["seed"], number("seed")),
    ]


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
