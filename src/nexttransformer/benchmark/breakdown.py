"""Where the time of an update goes, by kind of work, from the profiler.

A pass, the pass that reduces gradients (several ranks) and what follows the passes are profiled apart. Every
instant between the first and the last kernel has one class: computation first, communication only where
nothing is computed, idle where nothing runs. So the shares sum to 1.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nexttransformer.benchmark.kernel_classes import COMMUNICATION, IDLE, OPTIMIZER, classify
from nexttransformer.benchmark.measure import finish_update
from nexttransformer.benchmark.subject import Passes
from nexttransformer.benchmark.timing import synchronize
from nexttransformer.errors import RunFailure
from nexttransformer.training.gradients import accumulate_gradients

# Passes of one profile; operators on a CPU are many and slow to collect.
_NUM_PASSES = {"cuda": 2, "cpu": 1}
_NUM_KERNELS = 40
_NAME_LENGTH = 96
# Categories of the trace's events that occupy the device.
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

# Name, start and end in seconds.
Kernel = tuple[str, float, float]


def exclusive_seconds(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Returns class -> seconds; the values sum to the time from the first start to the last end.

    Computation that overlaps counts once, for the kernel that began first; communication counts only
    where nothing is computed.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    if not ordered:
        return {}
    result: defaultdict[str, float] = defaultdict(float)
    busy: list[tuple[float, float]] = []
    cursor = first = ordered[0][1]
    for name, start, end in ordered:
        kind = classify(name)
        if kind == COMMUNICATION:
            continue
        begin = max(start, cursor)
        if end > begin:
            result[kind] += end - begin
            busy.append((begin, end))
            cursor = end
    communication = sorted((start, end) for name, start, end in ordered if classify(name) == COMMUNICATION)
    exposed = _uncovered(communication, busy)
    if exposed:
        result[COMMUNICATION] = exposed
    last = max(end for _, _, end in ordered)
    result[IDLE] = max(0.0, last - first - sum(result.values()))
    return dict(result)


def _uncovered(intervals: list[tuple[float, float]], busy: list[tuple[float, float]]) -> float:
    """Returns the length of the union of sorted intervals outside sorted disjoint busy ones."""
    total, cursor, index = 0.0, float("-inf"), 0
    for start, end in intervals:
        begin = max(start, cursor)
        while index < len(busy) and busy[index][1] <= begin:
            index += 1
        look = index
        while begin < end:
            if look < len(busy) and busy[look][0] < end:
                total += max(0.0, busy[look][0] - begin)
                begin = max(begin, busy[look][1])
                look += 1
            else:
                total += end - begin
                begin = end
        cursor = max(cursor, end)
    return total


def _profile(device: torch.device, function: Callable[[], object], trace: Path | None = None) -> list[Kernel]:
    """Runs a function under the profiler; returns the device's kernels, or on a CPU the operators' own times."""
    synchronize(device)
    if device.type != "cuda":
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            function()
            wall = time.perf_counter() - began
        if trace is not None:
            profiler.export_chrome_trace(str(trace))
        return _laid_out([(each.key, each.self_cpu_time_total * 1e-6) for each in profiler.key_averages()], wall)
    activities = [ProfilerActivity.CUDA] if trace is None else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        function()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = trace if trace is not None else Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> list[Kernel]:
    """Returns what occupied the device in a profiler trace: kernels and copies, not the ranges drawn around them."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        (event["name"], float(event["ts"]) * 1e-6, (float(event["ts"]) + float(event["dur"])) * 1e-6)
        for event in events
        if event.get("cat") in _DEVICE_WORK
    ]


def _laid_out(operators: list[tuple[str, float]], wall_seconds: float) -> list[Kernel]:
    """Puts operators one after another, the rest of the wall time between the last two marks."""
    kernels, cursor = [], 0.0
    for name, seconds in operators:
        kernels.append((name, cursor, cursor + seconds))
        cursor += seconds
    end = max(cursor, wall_seconds)
    return [*kernels, ("end", end, end)]


def _add(total: dict[str, float], part: dict[str, float], factor: float) -> None:
    for kind, seconds in part.items():
        total[kind] = total.get(kind, 0.0) + factor * seconds


def measure_breakdown(passes: Passes, trace: Path | None = None) -> dict[str, Any]:
    """Profiles passes and the end of an update; composes the shares of a whole update of the protocol.

    Args:
        passes: warm, that is, compiled.
        trace: where to write the trace of the passes, operators included (rank 0).

    Raises:
        RunFailure: if the driver shows the profiler nothing.
    """
    device, world = passes.subject.world.device, passes.subject.world
    ids_BT1, weights_B = passes.rows()
    batch, plan = passes.last_batch(ids_BT1, weights_B)
    passes.subject.model.set_step(0)
    # Warm, and gradients exist: the passes add to them as in training.
    nats = accumulate_gradients(passes.forward, batch, plan)
    num_passes = _NUM_PASSES[device.type]
    kernels = _profile(device, lambda: passes.run(ids_BT1, weights_B, num_passes=num_passes))
    if not kernels:
        raise RunFailure("The profiler saw no kernel on this device; its driver may not allow profiling.")
    one_pass = {kind: seconds / num_passes for kind, seconds in exclusive_seconds(kernels).items()}
    last_pass, reducing = one_pass, []
    if world.world_size > 1:
        reducing = _profile(device, lambda: accumulate_gradients(passes.forward, batch, plan))
        last_pass = exclusive_seconds(reducing)
    ending = exclusive_seconds(_profile(device, lambda: finish_update(passes, batch, nats)))
    end: dict[str, float] = {}
    for kind, seconds in ending.items():
        _add(end, {kind if kind in (COMMUNICATION, IDLE) else OPTIMIZER: seconds}, 1.0)
    if trace is not None:
        # Apart: recording operators slows the host.
        _profile(device, lambda: passes.run(ids_BT1, weights_B), trace if world.is_main else None)
    update: dict[str, float] = {}
    _add(update, one_pass, passes.full_plan.num_micro_batches - 1)
    _add(update, last_pass, 1.0)
    _add(update, end, 1.0)
    total = sum(update.values())
    return {
        "source": "kernels" if device.type == "cuda" else "operators",
        "pass_seconds": one_pass,
        "pass_shares": _shares(one_pass),
        "reducing_pass_seconds": last_pass,
        "hidden_and_exposed_communication_seconds": sum(
            stop - start for name, start, stop in reducing if classify(name) == COMMUNICATION
        ),
        "end_seconds": end,
        "num_micro_batches": passes.full_plan.num_micro_batches,
        "update_seconds": total,
        "update_shares": _shares(update),
        "kernels": _heaviest(kernels, num_passes),
    }


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()} if total else {}


def _heaviest(kernels: list[Kernel], num_passes: int) -> list[dict[str, Any]]:
    """Returns the kernels that take the most time in one pass."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for name, start, end in kernels:
        seconds[name] += (end - start) / num_passes
        counts[name] += 1
    heaviest = sorted((name for name in seconds if seconds[name] > 0), key=lambda name: -seconds[name])[:_NUM_KERNELS]
    return [
        {
            "name": name[:_NAME_LENGTH],
            "class": classify(name),
            "seconds": seconds[name],
            "calls": counts[name] / num_passes,
        }
        for name in heaviest
    ]
