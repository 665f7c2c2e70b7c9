"""CORE arithmetic (E3), for evaluation files and records alike."""

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nexttransformer.audit.check import Finding, differs, error
from nexttransformer.evaluation.core_result import NUM_TASKS, centered
from nexttransformer.evaluation.results import CoreScore, CoreTaskScore
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, FULL_BUNDLE, Protocol

_TOLERANCE = 1e-12
# Formal evaluations take the shared path with canonical batches.
PATH = "shared"


def core_problems(core: CoreScore, tasks_file: dict[str, Any], protocol: Protocol, *, where: str) -> Iterator[Finding]:
    """Yields an error for every value that is not the bundle's or does not follow from the decisions.

    Args:
        core: the `core` part of an evaluation.
        tasks_file: content of the bundle's `tasks.json`.
        protocol: names bundle and batches.
        where: place of `core`.
    """
    digest = BUNDLE_TASKS_DIGESTS[protocol.core_bundle]
    facts = {"bundle_digest": digest, "limit": None, "path": PATH, "batch_tokens": protocol.core_batch_tokens}
    for key, expected in facts.items():
        yield from differs(f"CORE: {key}", f"{where}.{key}", expected=expected, got=getattr(core, key))
    labels = [task["label"] for task in tasks_file["tasks"]]
    found = [task.label for task in core.tasks]
    if found != labels:
        missing = sorted(set(labels) - set(found))
        yield error(
            "CORE does not have the bundle's tasks in its order.",
            f"{where}.tasks",
            expected=f"{NUM_TASKS} tasks",
            got=f"{len(found)} tasks; missing: {', '.join(missing)}",
        )
    entries = {task["label"]: task for task in tasks_file["tasks"]}
    for number, task in enumerate(core.tasks):
        if task.label in entries:
            yield from _task_problems(task, entries[task.label], f"{where}.tasks[{number}]")
    yield from _mean_problems(core, is_limited=digest != BUNDLE_TASKS_DIGESTS[FULL_BUNDLE], where=where)


def _task_problems(task: CoreTaskScore, entry: dict[str, Any], where: str) -> Iterator[Finding]:
    name = task.label
    facts = {
        "rows": entry["rows"],
        "num_fewshot": entry["num_fewshot"],
        "baseline_v1": entry["random_baseline"],
        "baseline_v2": entry["random_baseline_v2"],
        "error": None,
        "num_prefix_fallbacks": 0,
        "num_cut": 0,
    }
    for key, expected in facts.items():
        yield from differs(f"CORE task {name}: {key}", f"{where}.{key}", expected=expected, got=getattr(task, key))
    num_correct = _count_bits(task)
    if num_correct is None:
        yield error(f"CORE task {name}: correct_bits are not one bit per row.", f"{where}.correct_bits")
        return
    yield from differs(
        f"CORE task {name}: num_correct", f"{where}.num_correct", expected=num_correct, got=task.num_correct
    )
    if task.rows == 0:
        return
    accuracy = num_correct / task.rows
    values = {
        "accuracy": accuracy,
        "centered_v1": centered(accuracy, entry["random_baseline"]),
        "centered_v2": centered(accuracy, entry["random_baseline_v2"]),
    }
    for key, expected in values.items():
        got = getattr(task, key)
        if got is None or not abs(got - expected) <= _TOLERANCE:
            yield error(
                f"CORE task {name}: {key} is not what the decisions give.", f"{where}.{key}", expected=expected, got=got
            )


def correct_bits(task: CoreTaskScore) -> np.ndarray | None:
    """Returns the decisions, bool [rows]; None if the text is not one bit per row."""
    try:
        content = base64.b64decode(task.correct_bits or "", validate=True)
    except (binascii.Error, ValueError):
        return None
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8))
    if len(content) != -(-task.rows // 8) or bits[task.rows :].any():
        return None
    return bits[: task.rows].astype(bool)


def _count_bits(task: CoreTaskScore) -> int | None:
    bits = correct_bits(task)
    return None if bits is None else int(bits.sum())


def _mean_problems(core: CoreScore, *, is_limited: bool, where: str) -> Iterator[Finding]:
    means = {}
    for version in ("v1", "v2"):
        values = [getattr(task, f"centered_{version}") for task in core.tasks]
        is_whole = len(values) == NUM_TASKS and None not in values
        means[version] = math.fsum(values) / NUM_TASKS if is_whole else None
    expected = (
        {"core_v1": None, "core_v2": None, "core_limited": means["v1"]}
        if is_limited
        else {"core_v1": means["v1"], "core_v2": means["v2"], "core_limited": None}
    )
    for key, value in expected.items():
        got = getattr(core, key)
        if (got is None) != (value is None) or (got is not None and not abs(got - value) <= _TOLERANCE):
            yield error(f"CORE: {key} is not the mean of the tasks.", f"{where}.{key}", expected=value, got=got)
