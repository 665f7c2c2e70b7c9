"""Which implementation of each fused operation runs, and why: versions, supported pairs, and the choices made.

Nothing falls back silently: every choice is registered here once, with its reason, and goes into the run's record.
The paths of a recurrent operation are "fla" (the native kernel of fla-core), "kda_broadcast" (the gated delta rule
through the kernel of Kimi delta attention, identical mathematics) and "reference" (chunked plain PyTorch).
"""

import importlib.metadata
import os
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DISPATCH_VARIABLE = "FLA_DISABLE_BACKEND_DISPATCH"
# Our wrappers call inner functions of this release; older releases return wrong gradients without an error.
TESTED_FLA_CORE = ("0.6.0",)
_MINIMUM_TORCH = "2.7"
_MINIMUM_TRITON = "3.3"
# Triton miscompiles the backward with a scalar gate on Hopper from the first to before the second version
# (fla-org/flash-linear-attention#640); fla-core 0.6.0 raises in it.
_HOPPER_BUG_TRITON = ("3.4.0", "3.7.1")

# Entry point of fla-core -> whether that bug's backward serves it.
ENTRY_POINTS = {
    "chunk_gated_delta_rule": True,
    "chunk_comba": True,
    "chunk_precond_gated_delta_rule": True,
    "chunk_gated_delta_product": True,
    "chunk_simple_gla": True,
    "chunk_kda": False,
    "chunk_precond_kda": False,
    "chunk_gdn2": False,
    "chunk_delta_rule": False,
    "chunk_gla": False,
    "chunk_rwkv7": False,
    "parallel_forgetting_attn": False,
    "parallel_path_attn": False,
    "fused_attnres": False,
}


@dataclass(frozen=True)
class Versions:
    """Versions that decide whether a kernel can be trusted; None where a part is absent."""

    torch: str
    cuda: str | None
    driver: str | None
    triton: str | None
    fla_core: str | None


@dataclass(frozen=True)
class Choice:
    """What runs for one operation.

    Attributes:
        op: operation, a folder of `ops/`; attention names its window too.
        path: implementation, see the module text.
        reason: why this one, a short id such as "self_check_passed".
        guard: state of fla-core's guard: "in_force", "bypassed" or "none" (does not concern this path).
        problem: why the versions cannot be trusted, or what is missing; None where all is well.
    """

    op: str
    path: str
    reason: str
    guard: str = "none"
    problem: str | None = None


_choices: dict[str, Choice] = {}
# Read inside compiled regions, hence a plain dict of strings.
_paths: dict[str, str] = {}


def installed(distribution: str) -> str | None:
    """Returns the installed version of a distribution without importing it, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Returns the version of the NVIDIA kernel driver, or None without one."""
    file = Path("/proc/driver/nvidia/version")
    match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text()) if file.exists() else None
    return match.group(0) if match else None


def versions() -> Versions:
    """Returns the versions in use on this machine."""
    return Versions(torch.__version__, torch.version.cuda, driver_version(), installed("triton"), installed("fla-core"))


def is_older(version: str, other: str) -> bool:
    """Returns whether a version precedes another; a pre-release (3.7.1rc1, 3.7.1.dev0) precedes its release."""
    return _sort_key(version) < _sort_key(other)


def _sort_key(version: str) -> tuple[int, int, int, int]:
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(.*)", version)
    if match is None:
        raise ValueError(f"not a version: '{version}'")
    major, minor, patch = (int(part or 0) for part in match.groups()[:3])
    is_final = match.group(4) == "" or match.group(4)[0] in "+" or match.group(4).startswith(".post")
    return major, minor, patch, 0 if is_final else -1


def is_hopper(device: torch.device | None = None) -> bool:
    """Returns whether a CUDA device is of the Hopper generation, by fla-core's own test."""
    if not torch.cuda.is_available():
        return False
    return "NVIDIA H" in torch.cuda.get_device_name(device) or torch.cuda.get_device_capability(device)[0] == 9


def missing_package(found: Versions) -> str | None:
    """Returns why fla-core cannot be used at all, or None."""
    if found.fla_core is None:
        return f"fla-core is not installed. Install fla-core=={TESTED_FLA_CORE[-1]} (the 'gpu' extra)."
    if found.fla_core not in TESTED_FLA_CORE:
        return f"fla-core {found.fla_core} is not one of {', '.join(TESTED_FLA_CORE)}. Install {TESTED_FLA_CORE[-1]}."
    if found.triton is None:
        return "triton is not installed. Install the CUDA build of torch, which brings it."
    absent = [name for name in ("einops", "packaging") if installed(name) is None]
    return f"fla-core needs {' and '.join(absent)}. Install the 'gpu' extra." if absent else None


def unsupported_pair(entry_point: str, found: Versions, *, hopper: bool) -> str | None:
    """Returns why the versions cannot be trusted for an entry point of fla-core, with the cure, or None.

    Args:
        entry_point: a key of ENTRY_POINTS.
        found: installed versions; fla-core and triton present.
        hopper: whether the GPU is of the Hopper generation.
    """
    assert found.triton is not None
    pair = f"{entry_point} with fla-core {found.fla_core} and Triton {found.triton}"
    if is_older(found.triton, _MINIMUM_TRITON) or is_older(found.torch, _MINIMUM_TORCH):
        return f"{pair}, torch {found.torch}: expected Triton >= {_MINIMUM_TRITON} and torch >= {_MINIMUM_TORCH}."
    first, fixed = _HOPPER_BUG_TRITON
    if ENTRY_POINTS[entry_point] and hopper and not is_older(found.triton, first) and is_older(found.triton, fixed):
        return f"{pair} on a Hopper GPU: gradients may be wrong. Install Triton >= {fixed} (torch >= 2.12.1)."
    return None


def choose(choice: Choice, *, warning: str | None = None) -> None:
    """Registers what runs for an operation; `warning` says what is slower and why, once."""
    if warning is not None and _choices.get(choice.op) != choice:
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    _choices[choice.op] = choice
    _paths[choice.op] = choice.path


def chosen_path(op: str) -> str | None:
    """Returns the path chosen for an operation, or None; usable inside compiled code."""
    return _paths.get(op)


def is_fused(op: str, x: torch.Tensor, *, item_bytes: int = 2) -> bool:
    """Returns whether our own fused form of an operation runs for this input: of its size, on CUDA, not rejected."""
    return x.is_cuda and x.element_size() == item_bytes and _paths.get(op) != "reference"


def ensure_path(op: str) -> str:
    """Returns the path of an fla-core operation, choosing it without a self-check if none ran.

    The native kernel, with its guard in force (its backward then raises on an affected pair, it is never
    wrong silently), else the reference with one warning.
    """
    path = _paths.get(op)
    if path is None:
        problem = missing_package(versions())
        if problem is None:
            choose(Choice(op, "fla", "not_checked", "in_force"))
        else:
            choose(
                Choice(op, "reference", "no_fla_core", problem=problem),
                warning=f"{op}: running the plain PyTorch reference, several times slower: {problem}",
            )
        path = _paths[op]
    return path


def choices() -> list[dict[str, Any]]:
    """Returns every choice as plain JSON data, for the run's record and the log."""
    return [asdict(_choices[op]) for op in sorted(_choices)]


def forget_choices() -> None:
    """Clears all choices (a new self-check, tests)."""
    _choices.clear()
    _paths.clear()


def dispatch_setting() -> str:
    """Sets FLA_DISABLE_BACKEND_DISPATCH to 1 unless it is set; returns its value. Counts before fla's first import."""
    return os.environ.setdefault(DISPATCH_VARIABLE, "1")
