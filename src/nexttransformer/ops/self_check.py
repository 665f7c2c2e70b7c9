"""Kernel self-check at start-up: fused operations against their references, the policy, and the verdict for the record.

For each distinct fused operation of a composition, on every GPU of the run: forward, final state and every gradient
at the shapes in use, and at one length that is not a multiple of the chunk. All ranks pass or none.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch

from nexttransformer.config import ModelConfig
from nexttransformer.errors import ProtocolError
from nexttransformer.ops import backends, fla_core
from nexttransformer.ops.backends import Choice
from nexttransformer.ops.path_check import PathCheck, check_path, exercise_path, failure
from nexttransformer.ops.probes import GRADIENT_LIMITS, OUTPUT_LIMITS, Probe, Sizes, get_probe
from nexttransformer.registry import load_part

SCHEMA = "nexttransformer.kernel_check/1"
_REPORT = "Please report it as a bug with the output of: python -m nexttransformer.doctor --kernels"
_SLOW = "running the plain PyTorch reference, several times slower"

# Reasons of a choice that is known to be right: measured, or the reference itself where nothing is fused.
_TRUSTED = ("self_check_passed", "cpu", "float32")

# Operations whose cost and kernel depend on an attention window.
WINDOWED_OPS = ("attention", "forgetting_attention")

# Reduces a condition over all ranks: true where it holds on every rank.
AllAgree = Callable[[bool], bool]


class Tuner(Protocol):
    """Gives all ranks the same tiles before a kernel is checked; see `training.kernel_tuning`."""

    def complete(self, exercise: Callable[[], None]) -> None:
        """Tunes what `exercise` runs, on rank 0 alone, and installs the tiles everywhere. Collective."""
        ...

    def finish(self) -> dict[str, str] | None:
        """Returns digest and source of the tiles, or None if nothing was tuned. Collective."""
        ...


def fused_ops(config: ModelConfig) -> list[tuple[str, Sizes]]:
    """Returns every distinct fused operation of a composition with its shapes."""
    # Imported here: the models use the operations of this package.
    from nexttransformer.models.decoder import Decoder

    dim = config.head_dim
    sizes = Sizes(config.num_heads, dim, dim, config.context_tokens, config.mlp_width, config.vocab_size)
    found = {}
    for layer in config.layers:
        for op in load_part("mixer", layer["type"]).fused_ops_of(layer):
            window = layer.get("window") if op in WINDOWED_OPS else None
            found[op, sizes._replace(window=window)] = None
    residual = load_part("residual", config.residual["type"])
    for op in residual.fused_ops:
        found[op, sizes._replace(num_streams=config.residual.get("num_streams"))] = None
    for op in (*load_part("mlp", config.mlp_type).fused_ops, *Decoder.fused_ops):
        found[op, sizes] = None
    return list(found)


def needs_fla_core(config: ModelConfig) -> bool:
    """Returns whether a composition has an operation whose fused paths are fla-core's."""
    return any(None not in get_probe(op).entry_points.values() for op, _ in fused_ops(config))


def describe(op: str, sizes: Sizes) -> str:
    """Returns the name under which an operation's choice is registered: attention's windows are separate."""
    return op if sizes.window is None else f"{op}_window"


def check_kernels(
    config: ModelConfig,
    *,
    mode: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    all_agree: AllAgree = bool,
    tuner: Tuner | None = None,
) -> dict[str, Any]:
    """Checks the fused operations of a composition, chooses what runs, and returns the verdict for the record.

    Every rank must call it, before the model is built or compiled.

    Args:
        config: the composition.
        mode: "formal", "smoke" or "open".
        device: this rank's device. On a CPU nothing is fused and nothing is measured.
        dtype: compute dtype of the run.
        all_agree: logical and over all ranks; called the same number of times on each.
        tuner: chooses the tiles of fla-core's kernels; None leaves it to each process.

    Raises:
        ConfigError: if a stored tuning cannot be used, on every rank, in one line.
        ProtocolError: if the policy refuses the run, on every rank, in one line.
    """
    start = time.perf_counter()
    backends.forget_choices()
    checks: list[PathCheck] = []
    is_fused = device.type == "cuda" and dtype.itemsize == 2
    for op, sizes in fused_ops(config):
        if not is_fused:
            backends.choose(Choice(describe(op, sizes), "reference", "cpu" if device.type == "cpu" else "float32"))
            continue
        checks += decide_path(op, sizes, mode=mode, device=device, dtype=dtype, all_agree=all_agree, tuner=tuner)
    return {
        "schema": SCHEMA,
        "mode": mode,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": asdict(backends.versions()),
        backends.DISPATCH_VARIABLE: backends.dispatch_setting() if is_fused else None,
        "limits": {**OUTPUT_LIMITS, **{f"d{name}": limit for name, limit in GRADIENT_LIMITS.items()}},
        "checks": [asdict(check) for check in checks],
        "choices": backends.choices(),
        "tuning": None if tuner is None else tuner.finish(),
        "passed": all(choice["reason"] in _TRUSTED for choice in backends.choices()),
        "seconds": round(time.perf_counter() - start, 3),
    }


def decide_path(
    op: str,
    sizes: Sizes,
    *,
    mode: str,
    device: torch.device,
    dtype: torch.dtype,
    all_agree: AllAgree,
    tuner: Tuner | None = None,
) -> list[PathCheck]:
    """Runs the policy table of the specification for one operation; registers the choice."""
    probe, name = get_probe(op), describe(op, sizes)
    native, entry_point = next(iter(probe.entry_points.items()))
    is_formal = mode == "formal"

    def measured(path: str, guard: str) -> tuple[PathCheck, bool]:
        if tuner is not None and probe.entry_points[path] is not None:
            tuner.complete(lambda: exercise_path(op, path, sizes, device=device, dtype=dtype, guard=guard))
        check = check_path(op, path, sizes, device=device, dtype=dtype, guard=guard)
        return check, all_agree(check.passed)

    found, hopper = backends.versions(), backends.is_hopper(device)
    missing = backends.missing_package(found) if entry_point is not None else None
    if not all_agree(missing is None):
        problem = missing or "fla-core is missing on another rank."
        if is_formal:
            raise ProtocolError(f"--formal: {op}: {problem}")
        backends.choose(Choice(name, "reference", "no_fla_core", problem=problem), warning=f"{op}: {_SLOW}: {problem}")
        return []
    problem, is_gated = None, False
    if entry_point is not None:
        problem = backends.unsupported_pair(entry_point, found, hopper=hopper)
        is_gated = backends.ENTRY_POINTS[entry_point]
    is_bypassed = is_gated and fla_core.is_guard_bypassed()
    is_supported = all_agree(problem is None and not is_bypassed)
    if not is_supported:
        problem = problem or "fla-core's guard is bypassed, or the versions of another rank are unsupported."
        if is_formal:
            raise ProtocolError(f"--formal: {op}: {problem}")
        return _decide_unsupported(name, probe, problem, measured)
    guard = "in_force" if is_gated else "none"
    check, passed = measured(native, guard)
    if passed:
        backends.choose(Choice(name, native, "self_check_passed", guard))
        return [check]
    if is_formal:
        raise ProtocolError(f"--formal: {op}: the kernel failed its self-check: {failure(check)}. {_REPORT}")
    backends.choose(
        Choice(name, "reference", "self_check_failed", problem=failure(check)),
        warning=f"{op}: {_SLOW}: {failure(check)}. {_REPORT}",
    )
    return [check]


def _decide_unsupported(
    name: str, probe: Probe, problem: str, measured: Callable[[str, str], tuple[PathCheck, bool]]
) -> list[PathCheck]:
    """A smoke or open run on an unsupported pair: native without the guard, else another route, else the reference."""
    native, *others = probe.entry_points
    check, passed = measured(native, "bypassed")
    checks = [check]
    if passed:
        backends.choose(Choice(name, native, "self_check_passed", "bypassed", problem))
        return checks
    fla_core.set_guard_bypassed(False)
    # The other routes' own versions need no look: unsupported ones fail their check, and formal runs never come here.
    for path in others:
        other, passed = measured(path, "none")
        checks.append(other)
        if passed:
            backends.choose(
                Choice(name, path, "self_check_passed", problem=problem),
                warning=f"{probe.op}: running the slower path {path}: {failure(check)}; {problem}",
            )
            return checks
    backends.choose(
        Choice(name, "reference", "self_check_failed", problem=problem),
        warning=f"{probe.op}: {_SLOW}: {failure(check)}; {problem}",
    )
    return checks
