"""Gradient reach: after randomization every parameter is trained, row by row and column by column."""

import torch
from torch import Tensor

from nexttransformer.checking.findings import Finding
from nexttransformer.checking.tiny import build_randomized, random_ids
from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Lookup

# Initial values are cut to this size, so that no sigmoid or softmax is nearly closed.
VALUE_BOUND = 1.0
# Share of a parameter's largest gradient that counts as none: what the epsilons of norms leave.
NOISE = 1e-6
NUM_ROWS = 4
_CURE = "Remove the parameter or use it; what gets no gradient by design belongs into the scheme's unreached()."


def check_gradients(tiny: ModelConfig) -> list[Finding]:
    """Checks the gradients of a tiny copy.

    Rows of lookup tables are not judged, only tokens that occur reach them. A residual scheme's `unreached`
    names its exceptions.
    """
    model = build_randomized(tiny, bound=VALUE_BOUND)
    ids_BT = random_ids(tiny, rows=NUM_ROWS, num_tokens=tiny.context_tokens + 1)
    model(ids_BT[:, :-1], ids_BT[:, 1:]).mean().backward()
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Lookup)}
    excepted = {f"residual.{name}": rows for name, rows in model.residual.unreached().items()}
    findings = [
        Finding("gradient", f"unreached() names {name}, which is no parameter. Correct it.")
        for name in sorted(set(excepted) - {name for name, _ in model.named_parameters()})
    ]
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            findings.append(Finding("gradient", f"{name}: no gradient at all. {_CURE}"))
        elif not torch.isfinite(gradient).all():
            findings.append(Finding("gradient", f"{name}: gradient is not finite. Look for divisions, logs and roots."))
        else:
            missing = _unreached(gradient, excepted.get(name, []), has_rows=name not in tables)
            if missing:
                findings.append(
                    Finding("gradient", f"{name} {list(parameter.shape)}: no gradient in {missing}. {_CURE}")
                )
    return findings


def _unreached(gradient: Tensor, excepted: list[int], *, has_rows: bool) -> str:
    """Returns which rows and columns get no gradient, in words; empty if all do."""
    size = gradient.abs()
    rows = torch.ones(size.shape[:1], dtype=torch.bool)
    rows[excepted] = False
    if not rows.any():
        return ""
    size = size[rows]
    limit = NOISE * size.max()
    parts = []
    if has_rows:
        dead = size.flatten(1).amax(1) <= limit if size.ndim > 1 else size <= limit
        parts += _places("row", torch.arange(rows.numel())[rows][dead])
    if size.ndim > 1:
        dead = size.flatten(0, -2).amax(0) <= limit
        parts += _places("column", torch.arange(dead.numel())[dead])
    return " and ".join(parts)


def _places(kind: str, indices: Tensor) -> list[str]:
    if not indices.numel():
        return []
    shown = ", ".join(map(str, indices[:6].tolist()))
    return [f"{indices.numel()} {kind}{'s' * (indices.numel() > 1)} ({shown}{', ...' if indices.numel() > 6 else ''})"]
