"""Time on a device: marks that do not make the host wait, and the figures reported of repeated measurements."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nexttransformer.training.distributed import World


class Clock:
    """Marks on a device's own time line: CUDA events, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks now, in the order of the work given to the device."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Returns the times between successive marks; waits for the device."""
        synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [first.elapsed_time(second) / 1000 for first, second in pairs]
        return [second - first for first, second in pairs]


def synchronize(device: torch.device) -> None:
    """Waits until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new maximum of allocated memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Returns the most bytes that tensors took since the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def repeat(device: torch.device, function: Callable[[], object], *, num_steps: int, num_warmup: int) -> list[float]:
    """Returns the seconds of each timed call, after calls that do not count."""
    for _ in range(num_warmup):
        function()
    clock = Clock(device)
    clock.mark()
    for _ in range(num_steps):
        function()
        clock.mark()
    return clock.seconds()


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Returns number, median, smallest, largest and sum of some durations in seconds."""
    return {
        "num": len(samples),
        "median_seconds": statistics.median(samples),
        "min_seconds": min(samples),
        "max_seconds": max(samples),
        "total_seconds": sum(samples),
    }


def slowest(world: World, samples: Any, key: Callable[[Any], float]) -> Any:
    """Returns, on every rank, the samples of the rank that is slowest by `key`. Collective."""
    gathered = world.control.gather_objects(samples)
    return world.control.broadcast_object(None if gathered is None else max(gathered, key=key))
