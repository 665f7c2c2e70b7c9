"""Measures one path of a fused operation against its reference: forward, final state and every gradient."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nexttransformer.ops import fla_core
from nexttransformer.ops.probes import GRADIENT_LIMITS, OUTPUT_LIMITS, Case, Inputs, Probe, Sizes, get_probe

_SEED = 20_260
_TUNING_ROWS = 8
# Ratio recorded for a tensor with NaN or infinity, which JSON cannot hold.
NOT_FINITE = 1e30


@dataclass(frozen=True)
class PathCheck:
    """One path of one operation, measured.

    Attributes:
        op, path, entry_point: what ran; the entry point is fla-core's, or None.
        sizes: shapes.
        guard: state of fla-core's guard during the check: "in_force", "bypassed" or "none".
        ratios: case -> tensor (outputs by name, gradients as d<name>) -> RMS(error) / RMS(reference).
        passed: every ratio finite and within its limit.
        error: first line of the exception, if the kernel failed to run.
        seconds: time taken, compilation and autotuning included.
    """

    op: str
    path: str
    entry_point: str | None
    sizes: dict[str, int | None]
    guard: str
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    passed: bool = False
    error: str | None = None
    seconds: float = 0.0


def limit_of(tensor: str) -> float:
    """Returns the largest allowed ratio of an output ("o") or gradient ("dq")."""
    return OUTPUT_LIMITS[tensor] if tensor in OUTPUT_LIMITS else GRADIENT_LIMITS[tensor.removeprefix("d")]


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Returns RMS(actual - expected) / RMS(expected) in float64; NOT_FINITE unless `actual` is finite."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    ratio = (difference / expected.double().square().mean().sqrt().clamp_min(1e-30)).item()
    return ratio if math.isfinite(ratio) else NOT_FINITE


def compare(probe: Probe, path: str, sizes: Sizes, case: Case, device: torch.device, dtype: torch.dtype) -> dict:
    """Returns the error ratio of every output and gradient of one case."""
    generator = torch.Generator().manual_seed(_SEED + case.num_tokens)
    given = _given_inputs(probe, sizes, case, generator, device, dtype)
    fast_inputs = {name: x.detach().requires_grad_() for name, x in given.items()}
    exact_inputs = {name: x.double().requires_grad_() for name, x in given.items()}
    fast, exact = probe.run[path](fast_inputs, sizes), probe.reference(exact_inputs, sizes)
    upstream = {
        name: torch.randn(x.shape, generator=generator).to(device, dtype if name == "o" else torch.float32)
        for name, x in exact.items()
    }
    ratios = {name: error_ratio(fast[name], exact[name]) for name in exact}
    gradients = []
    for outputs, leaves in ((fast, fast_inputs), (exact, exact_inputs)):
        names = list(outputs)
        weights = [upstream[name].to(outputs[name].dtype) for name in names]
        gradients.append(torch.autograd.grad([outputs[name] for name in names], list(leaves.values()), weights))
    ratios |= {f"d{name}": error_ratio(a, b) for name, a, b in zip(given, *gradients, strict=True)}
    return ratios


def _given_inputs(
    probe: Probe, sizes: Sizes, case: Case, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Inputs:
    inputs = probe.make_inputs(sizes, case, generator)
    return {name: x.to(device, dtype if name in probe.rounded else x.dtype) for name, x in inputs.items()}


def exercise_path(
    op: str, path: str, sizes: Sizes, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, guard: str = "none"
) -> None:
    """Runs one path of a recurrent operation forward and backward, each case of its check, so that kernels are tuned.

    Tiles are measured at a batch as in training; the check itself has one row. Raises what the kernel raises.
    """
    if guard == "bypassed":
        fla_core.set_guard_bypassed(True)
    probe, generator = get_probe(op), torch.Generator().manual_seed(_SEED)
    for case in probe.cases(sizes):
        given = _given_inputs(probe, sizes, case, generator, device, dtype)
        leaves = {name: torch.cat([x] * _TUNING_ROWS).requires_grad_() for name, x in given.items()}
        outputs = list(probe.run[path](leaves, sizes).values())
        torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(x) for x in outputs])


def check_path(
    op: str, path: str, sizes: Sizes, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, guard: str = "none"
) -> PathCheck:
    """Measures one path of one operation on this process's device. Never raises for the kernel's own failure.

    With guard "bypassed", fla-core's guard is switched off first and stays off.
    """
    probe = get_probe(op)
    facts = (op, path, probe.entry_points[path], dict(sizes._asdict()), guard)
    start = time.perf_counter()
    ratios: dict[str, dict[str, float]] = {}
    error = None
    try:
        if guard == "bypassed":
            fla_core.set_guard_bypassed(True)
        for case in probe.cases(sizes):
            ratios[case.name] = compare(probe, path, sizes, case, device, dtype)
    # A kernel that fails in any way on one rank is a failed check on all; an exception here would leave them waiting.
    except Exception as exception:  # noqa: BLE001
        error = f"{type(exception).__name__}: {str(exception).strip()}".splitlines()[0][:300]
    passed = error is None and all(r <= limit_of(name) for case in ratios.values() for name, r in case.items())
    return PathCheck(*facts, ratios, passed, error, round(time.perf_counter() - start, 3))


def failure(check: PathCheck) -> str:
    """Returns what failed in a check, in a few words."""
    if check.error is not None:
        return check.error
    worst = [
        f"{name} {ratio:.3g} > {limit_of(name)} ({case})"
        for case, ratios in check.ratios.items()
        for name, ratio in ratios.items()
        if not ratio <= limit_of(name)
    ]
    return ", ".join(worst[:4]) or "failed on another rank"
