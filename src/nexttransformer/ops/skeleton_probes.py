"""Probes of the fused operations around the mixing: heads, MLP, residual streams, head loss, gradients of lookups."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.ops.convolved_heads.naive import convolved_heads_naive
from nexttransformer.ops.lookup_gradient import lookup
from nexttransformer.ops.lookup_gradient.naive import lookup_naive
from nexttransformer.ops.lookup_gradient.order import order_tokens
from nexttransformer.ops.probes import Case, Inputs, Outputs, Probe, Sizes
from nexttransformer.ops.relu_squared import relu_squared_mlp_naive
from nexttransformer.ops.rotary_heads.naive import rotary_heads_naive
from nexttransformer.ops.sinkhorn.naive import sinkhorn_naive
from nexttransformer.ops.stream_write.naive import Scaling, stream_write_naive

# Where the command does not say how many residual streams there are.
_NUM_STREAMS = 4
_SOFT_CAP, _QK_GAIN, _ROPE_BASE = 15.0, 1.2, 100_000.0
_SINKHORN_ROUNDS, _SINKHORN_EPS = 20, 1e-6


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _angles(sizes: Sizes, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [T, K/2] in the dtype of `like`, from bfloat16-rounded values on both sides."""
    half = sizes.key_dim // 2
    frequency = _ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(like.shape[1], dtype=torch.float64), frequency)
    cos, sin = (x.to(torch.bfloat16).to(like.device, like.dtype) for x in (angle.cos(), angle.sin()))
    return cos, sin


def rotary_heads_probe() -> Probe:
    """q, k, v side by side, with value rows and without: [1, T, 3 D] -> [1, T, H, 6 K]."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width, tokens = sizes.num_heads * sizes.key_dim, case.num_tokens
        return {
            "qkv": _normal(generator, 1, tokens, 3 * width),
            "row": _normal(generator, 1, tokens, width),
            "factor": 3 * torch.rand(1, tokens, sizes.num_heads, generator=generator),
        }

    def run(heads: Callable, x: Inputs, sizes: Sizes) -> Outputs:
        cos, sin = _angles(sizes, x["qkv"])
        rows = ((x["row"], x["factor"]), (None, None))
        made = [heads(x["qkv"], cos, sin, *row, sizes.num_heads, _QK_GAIN) for row in rows]
        return {"o": torch.cat([*made[0], *made[1]], -1)}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.rotary_heads.fused import rotary_heads_fused

        return run(rotary_heads_fused, x, sizes)

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return run(rotary_heads_naive, x, sizes)

    rounded = ("qkv", "row")
    return Probe("rotary_heads", {"native": None}, {"native": native}, reference, inputs, False, rounded)


def convolved_heads_probe() -> Probe:
    """q, k, v side by side, with value rows and without, two rows of tokens: [2, T, 3 D] -> [2, T, H, 6 K]."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width, tokens = sizes.num_heads * sizes.key_dim, case.num_tokens
        return {
            "qkv": _normal(generator, 2, tokens, 3 * width),
            "taps": torch.rand(3 * width, 4, generator=generator) - 0.5,
            "row": _normal(generator, 2, tokens, width),
            "factor": 3 * torch.rand(2, tokens, sizes.num_heads, generator=generator),
        }

    def run(heads: Callable, x: Inputs, sizes: Sizes) -> Outputs:
        rows = ((x["row"], x["factor"]), (None, None))
        made = [heads(x["qkv"], x["taps"], *row, sizes.num_heads) for row in rows]
        return {"o": torch.cat([*made[0], *made[1]], -1)}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.convolved_heads.fused import convolved_heads_fused

        return run(convolved_heads_fused, x, sizes)

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return run(convolved_heads_naive, x, sizes)

    return Probe("convolved_heads", {"native": None}, {"native": native}, reference, inputs, False, ("qkv", "row"))


def relu_squared_probe() -> Probe:
    """The MLP at the model's widths."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width, inner = sizes.num_heads * sizes.key_dim, sizes.mlp_width
        return {
            "x": _normal(generator, 1, case.num_tokens, width),
            "w1": _normal(generator, inner, width) * width**-0.5,
            "w2": _normal(generator, width, inner) * inner**-0.5,
        }

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.relu_squared.fused import relu_squared_mlp_fused

        return {"o": relu_squared_mlp_fused(x["x"], x["w1"], x["w2"])}

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return {"o": relu_squared_mlp_naive(x["x"], x["w1"], x["w2"])}

    rounded = ("x", "w1", "w2")
    return Probe("relu_squared", {"native": None}, {"native": native}, reference, inputs, False, rounded)


def stream_write_probe() -> Probe:
    """All four kinds of a write, with mixing or scaling or neither; weights of the size they have in training."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width, tokens = sizes.num_heads * sizes.key_dim, case.num_tokens
        num_streams = sizes.num_streams or _NUM_STREAMS
        return {
            "streams": _normal(generator, 1, tokens, num_streams, width),
            "y": _normal(generator, 1, tokens, width),
            "res": torch.softmax(_normal(generator, 1, tokens, num_streams, num_streams), dim=-1),
            "post": 2 * torch.rand(1, tokens, num_streams, generator=generator),
            "lambda": torch.tensor(1.1),
            "mu": torch.tensor(0.2),
            "x0": _normal(generator, 1, tokens, width),
        }

    def run(write: Callable, x: Inputs) -> Outputs:
        scaling = Scaling(x["lambda"], x["mu"], x["x0"])
        kinds = itertools.product((x["res"], None), (scaling, None))
        written = [write(x["streams"], x["y"], res, x["post"], scales) for res, scales in kinds]
        return {"o": torch.stack([new for new, _ in written]), "squares": torch.stack([each for _, each in written])}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.stream_write.fused import stream_write_fused

        return run(stream_write_fused, x)

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return run(stream_write_naive, x)

    rounded = ("streams", "y", "x0")
    return Probe("stream_write", {"native": None}, {"native": native}, reference, inputs, False, rounded)


def sinkhorn_probe() -> Probe:
    """Logits as large as a trained generator makes them; everything in float32."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        num_streams = sizes.num_streams or _NUM_STREAMS
        return {"logits": 3 * _normal(generator, 1, case.num_tokens, num_streams, num_streams)}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.sinkhorn.fused import sinkhorn_fused

        return {"o": sinkhorn_fused(x["logits"], _SINKHORN_ROUNDS, _SINKHORN_EPS)}

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return {"o": sinkhorn_naive(x["logits"], _SINKHORN_ROUNDS, _SINKHORN_EPS)}

    return Probe("sinkhorn", {"native": None}, {"native": native}, reference, inputs, False, ())


def cross_entropy_probe() -> Probe:
    """The head's loss over the whole vocabulary; targets are a fixed function of the position."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width = sizes.num_heads * sizes.key_dim
        weight = _normal(generator, sizes.vocab_size, width) * 0.05
        return {"h": functional.normalize(_normal(generator, case.num_tokens, width), dim=-1) * width**0.5, "w": weight}

    def targets(x: Inputs, sizes: Sizes) -> Tensor:
        positions = torch.arange(x["h"].shape[0], device=x["h"].device)
        return (positions * 7919 + 13) % sizes.vocab_size

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.cross_entropy.fused import softcap_cross_entropy_fused

        return {"o": softcap_cross_entropy_fused(x["h"], x["w"], targets(x, sizes), _SOFT_CAP)}

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        logits = functional.linear(x["h"], x["w"])
        capped = _SOFT_CAP * torch.tanh(logits / _SOFT_CAP)
        return {"o": functional.cross_entropy(capped, targets(x, sizes), reduction="none")}

    rounded = ("h", "w")
    return Probe("cross_entropy", {"native": None}, {"native": native}, reference, inputs, False, rounded)


def lookup_gradient_probe() -> Probe:
    """Rows of one table added to an input; ids as uneven as in text: rows of no, few and many tokens, the last too."""

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        width = sizes.num_heads * sizes.key_dim
        return {
            "x": _normal(generator, 1, case.num_tokens, width),
            "table": _normal(generator, sizes.vocab_size, width),
        }

    def run(x: Inputs, find: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Outputs:
        (_, num_tokens, _), num_rows = x["x"].shape, x["table"].shape[0]
        part = (torch.arange(num_tokens, device=x["x"].device) * 7919 % num_tokens).double() / num_tokens
        # The first of 32,768 ids gets every sixth token, the second every 46th.
        ids = torch.where(part == 0, num_rows - 1, (num_rows * part.pow(6)).long())[None]
        return {"o": find(ids, x["table"], x["x"].dtype) + x["x"]}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        return run(x, lambda ids, table, dtype: lookup(ids, table, dtype, order_tokens(ids, table.shape[0])))

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return run(x, lookup_naive)

    return Probe("lookup_gradient", {"native": None}, {"native": native}, reference, inputs, False, ("x",))
