"""What `doctor` says about kernels: versions that can be trusted, and every fused operation measured."""

import os
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from nexttransformer.diagnostics import FAIL, NOTE, OK, Finding
from nexttransformer.ops import backends, fla_core
from nexttransformer.ops.path_check import PathCheck, check_path, exercise_path, failure, limit_of
from nexttransformer.ops.probes import Sizes, get_probe
from nexttransformer.ops.self_check import Tuner
from nexttransformer.protocol import FORMAL_V1, Protocol
from nexttransformer.training.versions import device_name

_WINDOWED = ("attention", "forgetting_attention")


def kernel_versions() -> list[Finding]:
    """Whether fla-core can be used, and which entry points the versions support on this GPU."""
    area = "kernels"
    if not torch.cuda.is_available():
        return [Finding(area, NOTE, "no GPU: references only, nothing to check")]
    found = backends.versions()
    missing = backends.missing_package(found)
    if missing is not None:
        return [Finding(area, FAIL, missing, "bash launch/install.sh --gpu installs tested versions.")]
    pair = f"fla-core {found.fla_core} with Triton {found.triton}"
    findings = [Finding(area, OK, f"{pair}, {backends.DISPATCH_VARIABLE}={backends.dispatch_setting()}")]
    if os.environ.get(backends.DISPATCH_VARIABLE) != "1":
        cure = f"source launch/env.sh sets {backends.DISPATCH_VARIABLE}=1, the published recipe."
        findings.append(Finding(area, NOTE, "fla-core may choose other backends by itself", cure))
    for entry_point in ("chunk_gated_delta_rule", "chunk_kda", "parallel_forgetting_attn"):
        problem = backends.unsupported_pair(entry_point, found, hopper=backends.is_hopper())
        if problem is not None:
            cure = "Formal runs are refused on it; others run what the self-check passes: doctor --kernels."
            findings.append(Finding(area, NOTE, problem, cure))
    return findings


def check_all_kernels(
    console: Console,
    ops: list[str],
    *,
    head_dim: int,
    device: torch.device,
    protocol: Protocol = FORMAL_V1,
    tuner: Tuner | None = None,
) -> tuple[list[PathCheck], list[Finding]]:
    """Measures every path of the given fused operations at a protocol's width and context, and prints the table.

    Where fla-core's guard would raise, it is switched off for the measurement only. Kernels run with the tuner's
    tiles, as in a run on this machine.
    """
    width, tokens = protocol.width, protocol.context_tokens
    table = Table(title=f"error ratios (limit) on {device_name(device)}, head dim {head_dim}, {tokens} tokens")
    for column in ("operation", "path", "guard", "case", "ratios", "seconds", "passed"):
        table.add_column(column, overflow="fold")
    found = backends.versions()
    checks, findings = [], []
    for op in ops:
        for window in (None, tokens // 4) if op in _WINDOWED else (None,):
            heads = width // head_dim
            sizes = Sizes(heads, head_dim, head_dim, tokens, protocol.mlp_width, protocol.vocab_size, window)
            for path, entry_point in get_probe(op).entry_points.items():
                if entry_point is not None and backends.missing_package(found) is not None:
                    continue
                guard = _guard(entry_point, found, device)
                console.print(f"checking {op} {path}{'' if window is None else f' window {window}'} ...")
                if tuner is not None and entry_point is not None:
                    tuner.complete(partial(exercise_path, op, path, sizes, device=device, guard=guard))
                check = check_path(op, path, sizes, device=device, guard=guard)
                fla_core.set_guard_bypassed(False)
                checks.append(check)
                findings += _judge(check)
                for case, ratios in (check.ratios or {"": {}}).items():
                    text = "  ".join(f"{name} {ratio:.4f} ({limit_of(name)})" for name, ratio in ratios.items())
                    name = op if window is None else f"{op} window {window}"
                    cells = (check.guard, case, text or check.error or "", f"{check.seconds:.1f}", str(check.passed))
                    table.add_row(name, path, *cells)
    if tuner is not None:
        tuner.finish()
    console.print(table)
    return checks, findings


def _guard(entry_point: str | None, found: backends.Versions, device: torch.device) -> str:
    """Returns the state of the guard to measure under: "none", "in_force", or "bypassed" where it would raise."""
    if entry_point is None or not backends.ENTRY_POINTS[entry_point]:
        return "none"
    is_affected = backends.unsupported_pair(entry_point, found, hopper=backends.is_hopper(device)) is not None
    return "bypassed" if is_affected else "in_force"


def _judge(check: PathCheck) -> list[Finding]:
    if check.passed:
        return []
    cure = (
        "Formal runs refuse it, others take another path. Update torch and Triton; if that fails, report this output."
    )
    return [Finding("kernels", FAIL, f"{check.op} {check.path}: {failure(check)}", cure)]
