"""Counted forward pass: how often each weight really multiplies a token, against what its module declares.

A forward of a tiny copy runs under a dispatch mode. Every tensor that is only a view, slice, join or cast of
parameters has a shadow of equal shape holding, per element, which parameter it came from; a product that takes such a
tensor is charged to those parameters, however the part wrote it. Products without a weight are sequence mixing.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from nexttransformer.checking.findings import Finding
from nexttransformer.checking.tiny import random_ids
from nexttransformer.models import Decoder
from nexttransformer.models.parts import Part

_aten = torch.ops.aten
# Operations that only rearrange elements: applied to the shadow as they are.
_REARRANGING = {
    getattr(_aten, name)
    for name in (
        "t transpose permute view _unsafe_view reshape expand slice select split split_with_sizes unbind cat stack "
        "unsqueeze squeeze narrow index_select gather index repeat flip roll constant_pad_nd as_strided"
    ).split()
}
# Products whose first argument is added, not multiplied.
_ADDING = {_aten.addmm, _aten.baddbmm}
# Full tiles and masked squares compute at most twice what the causal-exact formulas charge.
MIXING_LIMIT = 2.5


@dataclass(frozen=True)
class Counts:
    """Multiply-adds per token of one forward pass.

    Attributes:
        products: parameter name -> in matrix products and convolutions.
        elementwise: parameter name -> in broadcast multiplications with activations.
        mixing: in products without a weight.
    """

    products: dict[str, float]
    elementwise: dict[str, float]
    mixing: float


class _Counter(TorchDispatchMode):
    """Charges multiply-adds to parameters; parameter i has shadow value i + 1, other elements 0."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        # Shadows by tensor identity; the tensor itself is kept so that its identity is not used again.
        self._shadows: dict[int, tuple[Tensor, Tensor]] = {}
        for index, parameter in enumerate(parameters.values()):
            self._remember(parameter, torch.full(parameter.shape, index + 1, dtype=torch.int32))
        self._num_values = len(parameters) + 1
        self.products = torch.zeros(self._num_values, dtype=torch.float64)
        self.elementwise = torch.zeros(self._num_values, dtype=torch.float64)
        self.mixing = 0.0

    def _remember(self, tensor: Tensor, shadow: Tensor) -> None:
        self._shadows[id(tensor)] = (tensor, shadow)

    def _shadow(self, value: Any) -> Tensor | None:
        found = self._shadows.get(id(value)) if isinstance(value, Tensor) else None
        return found[1] if found is not None else None

    def _charge(self, totals: Tensor, shadow: Tensor, macs: float) -> None:
        counts = torch.bincount(shadow.flatten(), minlength=self._num_values).double()
        totals += counts * (macs / shadow.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shadows = [shadow for leaf in inputs if (shadow := self._shadow(leaf)) is not None]
        if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
            q_BHTK, k_BHSK, v_BHSV = args[:3]
            self.mixing += q_BHTK.numel() * k_BHSK.shape[2] * (1 + v_BHSV.shape[3] / q_BHTK.shape[3])
        elif packet in flop_registry:
            macs = flop_registry[packet](*args, **kwargs, out_val=result) / 2
            factors = args[1:3] if packet in _ADDING else args[:2]
            weights = [shadow for value in factors if (shadow := self._shadow(value)) is not None]
            if len(weights) == 1:
                self._charge(self.products, weights[0], macs)
            elif not weights:
                self.mixing += macs
        elif not shadows:
            return result
        elif packet in _REARRANGING:
            self._rearrange(func, args, kwargs, result)
        elif isinstance(result, Tensor):
            same = [shadow for shadow in shadows if shadow.shape == result.shape]
            if same:
                # A cast, copy or elementwise function of the weight itself.
                self._remember(result, same[0])
            elif packet is _aten.mul and len(shadows) == 1:
                self._charge(self.elementwise, shadows[0], result.numel())
        return result

    def _rearrange(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        def shadow_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shadow = self._shadow(value)
            if shadow is not None:
                return shadow
            return value if value.dtype in (torch.int64, torch.bool) else torch.zeros(value.shape, dtype=torch.int32)

        if func.overloadpacket in (_aten.view, _aten._unsafe_view):
            moved: Any = shadow_of(args[0]).reshape(result.shape)
        else:
            moved = func(*tree_map(shadow_of, args), **kwargs)
        pairs = [(result, moved)] if isinstance(result, Tensor) else list(zip(result, moved, strict=True))
        for tensor, shadow in pairs:
            self._remember(tensor, shadow)


def count_forward(model: Decoder) -> Counts:
    """Runs one forward pass of a tiny model on the CPU and counts its multiply-adds per token."""
    ids_BT = random_ids(model.config, rows=2)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    counter = _Counter(dict(model.named_parameters()))
    with torch.no_grad(), counter:
        model(ids_BT)
    tokens = ids_BT.numel()
    return Counts(
        products=dict(zip(parameters, (counter.products[1:] / tokens).tolist(), strict=True)),
        elementwise=dict(zip(parameters, (counter.elementwise[1:] / tokens).tolist(), strict=True)),
        mixing=counter.mixing / tokens,
    )


def counting_findings(model: Decoder) -> list[Finding]:
    """Compares measured and declared uses of every weight, and the mixing with its formula (rule B5)."""
    counts = count_forward(model)
    lines: dict[str, list[str]] = {}
    residual_macs = 0.0
    for prefix, module in model.named_modules():
        if not isinstance(module, Part):
            continue
        own = dict(module.named_parameters(recurse=False))
        numel = sum(parameter.numel() for parameter in own.values())
        declared = module.token_macs() / numel if numel else 0.0
        for short, parameter in own.items():
            name = f"{prefix}.{short}" if prefix else short
            macs = counts.products[name]
            # Gains and scales are elementwise work, free by convention.
            if declared or parameter.ndim > 1:
                macs += counts.elementwise[name]
            uses = macs / parameter.numel()
            if abs(uses - declared) <= 1e-6 * max(uses, declared):
                continue
            if not declared and prefix.split(".")[0] == "residual":
                residual_macs += macs
                continue
            lines.setdefault(_line(uses, declared), []).append(name)
    findings = [Finding("counts", f"{_names(names)}: {line}") for line, names in lines.items()]
    extra = model.residual.extra_macs()
    if residual_macs > extra * (1 + 1e-6):
        findings.append(
            Finding(
                "counts",
                f"the residual scheme's own parameters take {residual_macs:,.0f} multiply-adds per token in products, "
                f"its extra_macs declares {extra:,.0f}. Put weights into Linear, or add them to extra_macs.",
            )
        )
    num_tokens = model.config.context_tokens
    mixing = sum(block.attn.mix_macs(num_tokens) for block in model.blocks) + extra
    if counts.mixing > MIXING_LIMIT * mixing:
        findings.append(
            Finding(
                "B5",
                f"products without weights take {counts.mixing:,.0f} multiply-adds per token in a tiny copy, declared "
                f"are {mixing:,.0f} (mix_macs and extra_macs); at most {MIXING_LIMIT} times that is plausible. "
                f"Take mix_macs from models/budget_formulas.py and count every pass.",
            )
        )
    return findings


def _line(uses: float, declared: float) -> str:
    if declared:
        return (
            f"multiplies a token {uses:.4g} times, declared are {declared:.4g} uses. "
            f"Pass uses={uses:.4g} to its Linear, or use the weight as declared."
        )
    return (
        f"multiplies a token {uses:.4g} times, declared are 0 uses. "
        f"Hold the weight in Linear or CausalConv (models/layers.py), which count it."
    )


def _names(names: list[str]) -> str:
    """Returns the first name, and how many further ones differ only in their numbers or not at all."""
    kinds = dict.fromkeys(re.sub(r"\d+", "*", name) for name in names)
    return ", ".join(kinds) if len(names) > 1 else names[0]
