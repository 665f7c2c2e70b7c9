"""Gradient reach: after randomization every parameter is trained, row by row and column by column."""

import torch
from torch import Tensor

from nexttransformer.checking.findings import Finding
from nexttransformer.checking.tiny import build_randomized, random_ids
from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder
from nexttransformer.models.layers import Lookup

# Initial values are cut to this size, so that no sigmoid or softmax is nearly closed.
VALUE_BOUND = 1.0
# Share of a parameter's largest gradient that counts as none: what the epsilons of norms leave.
NOISE = 1e-6
NUM_ROWS = 2
# A gradient may happen to cancel; what is missing must be missing for each of these draws of weights and tokens.
SEEDS = (3, 4, 5)
_CURE = "Remove the parameter or use it; what gets no gradient by design belongs into the scheme's unreached()."

# Parameter -> ("row" or "column", index) without a gradient.
Missing = dict[str, set[tuple[str, int]]]


def check_gradients(tiny: ModelConfig) -> list[Finding]:
    """Checks the gradients of a tiny copy.

    Rows of lookup tables are not judged, only tokens that occur reach them. A residual scheme's `unreached`
    names its exceptions.
    """
    missing: Missing = {}
    for seed in SEEDS:
        model = build_randomized(tiny, bound=VALUE_BOUND, seed=seed)
        ids_BT = random_ids(tiny, rows=NUM_ROWS, num_tokens=tiny.context_tokens + 1, seed=seed)
        model(ids_BT[:, :-1], ids_BT[:, 1:]).mean().backward()
        findings = _broken(model)
        if findings:
            return findings
        found = _missing(model)
        missing = {name: found.get(name, set()) & places for name, places in missing.items()} if missing else found
        missing = {name: places for name, places in missing.items() if places}
        if not missing:
            return []
    return [
        Finding("gradient", f"{name}: no gradient in {_words(places)}. {_CURE}") for name, places in missing.items()
    ]


def _broken(model: Decoder) -> list[Finding]:
    """Returns findings for parameters without any gradient, with one that is not finite, and unknown exceptions."""
    findings = []
    names = {name for name, _ in model.residual.named_parameters()}
    for name in sorted(set(model.residual.unreached()) - names):
        findings.append(Finding("gradient", f"unreached() names residual.{name}, which is no parameter. Correct it."))
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            findings.append(Finding("gradient", f"{name}: no gradient at all. {_CURE}"))
        elif not torch.isfinite(parameter.grad).all():
            findings.append(Finding("gradient", f"{name}: gradient is not finite. Look for divisions, logs and roots."))
    return findings


def _missing(model: Decoder) -> Missing:
    """Returns the rows and columns of each parameter that get no gradient."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Lookup)}
    excepted = {f"residual.{name}": rows for name, rows in model.residual.unreached().items()}
    missing: Missing = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        places = _places(parameter.grad.abs(), excepted.get(name, []), has_rows=name not in tables)
        if places:
            missing[name] = places
    return missing


def _places(size: Tensor, excepted: list[int], *, has_rows: bool) -> set[tuple[str, int]]:
    """Returns ("row", i) and ("column", j) where |gradient| is at most noise, rows in `excepted` left out."""
    judged = torch.ones(size.shape[:1], dtype=torch.bool)
    judged[excepted] = False
    if not judged.any():
        return set()
    size, rows = size[judged], torch.arange(judged.numel())[judged]
    limit = NOISE * size.max()
    places = set()
    if has_rows:
        is_dead = size.flatten(1).amax(1) <= limit if size.ndim > 1 else size <= limit
        places |= {("row", index) for index in rows[is_dead].tolist()}
    if size.ndim > 1:
        is_dead = size.flatten(0, -2).amax(0) <= limit
        places |= {("column", index) for index in is_dead.nonzero().flatten().tolist()}
    return places


def _words(places: set[tuple[str, int]]) -> str:
    texts = []
    for kind in ("row", "column"):
        indices = sorted(index for each, index in places if each == kind)
        if indices:
            shown = ", ".join(map(str, indices[:6])) + (", ..." if len(indices) > 6 else "")
            texts.append(f"{len(indices)} {kind}{'s' * (len(indices) > 1)} ({shown})")
    return " and ".join(texts)
