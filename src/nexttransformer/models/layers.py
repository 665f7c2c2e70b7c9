"""Layers every part is built from: linear, lookup, causal convolution, RMS norm, rotary table, MLP.

Shape letters: F MLP width, C channels, J taps.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from nexttransformer.config import ModelConfig
from nexttransformer.models.parts import Init, Options, Part, Rope, uniform, zeros
from nexttransformer.ops.convolved_heads.naive import causal_convolution
from nexttransformer.ops.joint_product import joint_product
from nexttransformer.ops.lookup_gradient import LookupOrder, lookup
from nexttransformer.ops.norm import NORM_EPS, has_written_out_gradient, rms_norm
from nexttransformer.ops.relu_squared import relu_squared_mlp

__all__ = [
    "NORM_EPS",
    "CausalConv",
    "Linear",
    "Lookup",
    "ReluSquaredMLP",
    "cached_weights",
    "joint_linear",
    "projection_bound",
    "rms_norm",
    "rope_table",
]


class Linear(Part):
    """y = x W^T without bias; the float32 weight is cast to the input's dtype at each use.

    Args:
        in_features: input width.
        out_features: output width.
        tag: optimizer tag.
        init: initial distribution of the weight (out, in).
        uses: how often a token's forward pass multiplies by this weight (budget counter).
        is_float32: compute in float32 whatever the input's dtype (generators of coefficients).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tag: str,
        init: Init,
        uses: float = 1.0,
        is_float32: bool = False,
    ) -> None:
        super().__init__()
        self.uses = uses
        self.is_float32 = is_float32
        self.cache: _CastCache | None = None
        self.declare("weight", (out_features, in_features), tag=tag, init=init)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_float32:
            return functional.linear(x.float(), self.weight)
        return functional.linear(x, self.cast_weight(x.dtype))

    def cast_weight(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype`; inside `cached_weights` the copy made at its first use."""
        return _cast((self,), dtype)

    def token_macs(self) -> float:
        return self.weight.numel() * self.uses


def joint_linear(x: Tensor, *layers: Linear) -> Tensor:
    """Applies several Linear layers to one input as one product over their stacked weights; outputs side by side."""
    # The gradient of three weights in one product is slower than in two, see there.
    if len(layers) > 2 and has_written_out_gradient(x) and torch.is_grad_enabled():
        return joint_product(x, *(layer.cast_weight(x.dtype) for layer in layers))
    return functional.linear(x, _cast(layers, x.dtype))


class _CastCache:
    """Casts made so far, by layers and dtype, with the versions of the weights they were made from."""

    def __init__(self) -> None:
        self._casts: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], Tensor]] = {}

    def get(self, layers: tuple[Linear, ...], dtype: torch.dtype) -> Tensor:
        """Returns the cast of the stacked weights; made anew if one was changed in place since."""
        key = (tuple(map(id, layers)), dtype)
        versions = [layer.weight._version for layer in layers]
        found = self._casts.get(key)
        if found is None or found[0] != versions:
            found = self._casts[key] = (versions, _stack(layers, dtype))
        return found[1]


def _stack(layers: tuple[Linear, ...], dtype: torch.dtype) -> Tensor:
    weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
    return weight.to(dtype)


def _cast(layers: tuple[Linear, ...], dtype: torch.dtype) -> Tensor:
    cache = layers[0].cache
    # Gradients flow through a cast of their own, and compiled code fuses it.
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _stack(layers, dtype)
    return cache.get(layers, dtype)


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Keeps every weight's cast to the compute dtype while evaluating, instead of making it at each use.

    Only where no gradients are recorded. Costs the model's products a second time in the compute dtype
    (1.4 GB at full size in bfloat16), freed at the end. Results are the same bits.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    cache = _CastCache()
    for layer in layers:
        layer.cache = cache
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None


class Lookup(Part):
    """Table of rows; a lookup costs no FLOPs. Rows are cast to `dtype` right after the lookup."""

    def __init__(self, num_rows: int, width: int, *, tag: str, init: Init) -> None:
        super().__init__()
        self.declare("weight", (num_rows, width), tag=tag, init=init)

    def forward(self, ids_BT: Tensor, dtype: torch.dtype, order: LookupOrder | None = None) -> Tensor:
        """Looks up; `order` is what `ops.lookup_gradient.lookup_order` returns for these ids, shared by tables."""
        return lookup(ids_BT, self.weight, dtype, order)


class CausalConv(Part):
    """Depthwise causal convolution over time, no bias: y_t = sum_j w[c, j] x_{t-J+1+j}.

    Weights (C, J), tag small, init U(-J^-1/2, J^-1/2); counted as C*J multiply-adds per token.
    """

    def __init__(self, channels: int, taps: int = 4) -> None:
        super().__init__()
        self.taps = taps
        self.declare("weight", (channels, taps), tag="small", init=uniform(-(taps**-0.5), taps**-0.5))

    def forward(self, x_BTC: Tensor, cache_BJC: Tensor | None = None) -> Tensor:
        """Convolves; `cache_BJC` holds the J-1 inputs before the first token (zeros if None)."""
        return causal_convolution(x_BTC, self.weight, cache_BJC).to(x_BTC.dtype)

    def next_cache(self, x_BTC: Tensor, cache_BJC: Tensor | None) -> Tensor:
        """Returns the last J-1 inputs of the sequence so far, [B, J-1, C]."""
        keep = self.taps - 1
        if cache_BJC is None:
            cache_BJC = x_BTC.new_zeros(x_BTC.shape[0], keep, x_BTC.shape[2])
        return torch.cat([cache_BJC, x_BTC], dim=1)[:, -keep:].contiguous()

    def token_macs(self) -> float:
        return self.weight.numel()


def rope_table(num_tokens: int, head_dim: int, base: float, *, device: torch.device | str, dtype: torch.dtype) -> Rope:
    """Returns cos and sin of t * base^(-2j/K) for t < num_tokens, j < K/2, [T, K/2].

    Angles are float32; the table is rounded once to `dtype`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / (base**exponent)
    angle = torch.outer(torch.arange(num_tokens, dtype=torch.float32, device=device), frequency)
    return Rope(angle.cos().to(dtype), angle.sin().to(dtype))


class ReluSquaredMLP(Part):
    """y = W_2 relu(W_1 x)^2. Tags: both matrices Muon. Init: W_1 U(-0.4s, 0.4s), W_2 zero."""

    Options = Options
    fused_ops = ("relu_squared",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bound = 0.4 * projection_bound(config.width)
        self.c_fc = Linear(config.width, config.mlp_width, tag="matrix", init=uniform(-bound, bound))
        self.c_proj = Linear(config.mlp_width, config.width, tag="matrix", init=zeros())

    def forward(self, x_BTD: Tensor) -> Tensor:
        return relu_squared_mlp(x_BTD, self.c_fc.cast_weight(x_BTD.dtype), self.c_proj.cast_weight(x_BTD.dtype))


def projection_bound(width: int) -> float:
    """Bound s = sqrt(3/D) of the uniform projection init, whose standard deviation is D^-1/2."""
    return (3.0 / width) ** 0.5
