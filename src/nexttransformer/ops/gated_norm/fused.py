"""Fused CUDA form: one pass each way, which keeps only its inputs. A program has some tokens of one head.

Compiled from plain PyTorch the backward pass takes three kernels, each of which reads output, gate and gradient again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a step and warps; backward also steps of a program, over which it sums the gradients of gain and bias.
_TOKENS, _WARPS, _STEPS = 16, 4, 8


@triton.jit
def _gate(z, is_silu: tl.constexpr):
    """Returns the activation and its derivative."""
    # The square of an inverse root takes fewer instructions than a division.
    root = tl.rsqrt(1.0 + tl.exp(-z))
    sigmoid = root * root
    gate = z * sigmoid if is_silu else sigmoid
    derivative = sigmoid + (gate - gate * sigmoid) if is_silu else sigmoid - sigmoid * sigmoid
    return gate, derivative


@triton.jit
def _gated_norm_forward_kernel(
    o,
    z,
    gain,
    bias,
    y,
    num_tokens,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    tokens: tl.constexpr,
    is_silu: tl.constexpr,
    has_bias: tl.constexpr,
):
    t = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, dim)
    at = t[:, None] * (heads * dim) + (head * dim + lane)[None, :]
    inside = (t < num_tokens)[:, None]
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        before += tl.load(bias + head * dim + lane)[None, :]
    gate, _ = _gate(before, is_silu)
    scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)
    out = x * scale[:, None] * tl.load(gain + lane)[None, :] * gate
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_backward_kernel(
    dy,
    o,
    z,
    gain,
    bias,
    do,
    dz,
    dgain,
    dbias,
    num_tokens,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    tokens: tl.constexpr,
    steps: tl.constexpr,
    is_silu: tl.constexpr,
    has_bias: tl.constexpr,
):
    head = tl.program_id(1)
    lane = tl.arange(0, dim)
    gain_V = tl.load(gain + lane)[None, :]
    gains = tl.zeros((tokens, dim), dtype=tl.float32)
    biases = tl.zeros((tokens, dim), dtype=tl.float32)
    kind = do.dtype.element_ty
    for step in range(steps):
        t = ((tl.program_id(0) * steps + step) * tokens + tl.arange(0, tokens)).to(tl.int64)
        at = t[:, None] * (heads * dim) + (head * dim + lane)[None, :]
        inside = (t < num_tokens)[:, None]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            before += tl.load(bias + head * dim + lane)[None, :]
        gate, derivative = _gate(before, is_silu)
        scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
        unit = x * scale
        along = g * unit
        change = along * gain_V * derivative
        tl.store(dz + at, change.to(kind), mask=inside)
        gains += along * gate
        if has_bias:
            biases += change
        mean = tl.sum(along * gate * gain_V, 1) / dim
        tl.store(do + at, (scale * (g * gate * gain_V - unit * mean[:, None])).to(kind), mask=inside)
    place = (tl.program_id(0).to(tl.int64) * heads + head) * dim + lane
    tl.store(dgain + place, tl.sum(gains, 0))
    if has_bias:
        tl.store(dbias + place, tl.sum(biases, 0))


def _options(o: Tensor, bias: Tensor | None, activation: str) -> dict[str, int | bool]:
    return {
        "heads": o.shape[2],
        "dim": o.shape[3],
        "tokens": _TOKENS,
        "is_silu": activation == "silu",
        "has_bias": bias is not None,
        "num_warps": _WARPS,
    }


@torch.library.custom_op("nexttransformer::gated_norm", mutates_args=())
def _forward(o: Tensor, z: Tensor, gain: Tensor, bias: Tensor | None, activation: str, eps: float) -> Tensor:
    y = torch.empty_like(o)
    num_tokens = o.shape[0] * o.shape[1]
    grid = (triton.cdiv(num_tokens, _TOKENS), o.shape[2])
    _gated_norm_forward_kernel[grid](  # pyright: ignore[reportIndexIssue]
        o, z, gain, bias if bias is not None else gain, y, num_tokens, eps, **_options(o, bias, activation)
    )
    return y


@_forward.register_fake
def _(o, z, gain, bias, activation, eps):
    return torch.empty_like(o)


@torch.library.custom_op("nexttransformer::gated_norm_backward", mutates_args=())
def _backward(
    dy: Tensor, o: Tensor, z: Tensor, gain: Tensor, bias: Tensor | None, activation: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of o, z, gain and bias (empty without one)."""
    do, dz = torch.empty_like(o), torch.empty_like(z)
    num_tokens, heads, dim = o.shape[0] * o.shape[1], o.shape[2], o.shape[3]
    num_sums = triton.cdiv(num_tokens, _TOKENS * _STEPS)
    dgain = gain.new_empty(num_sums, heads, dim)
    dbias = gain.new_empty(num_sums, heads, dim) if bias is not None else gain.new_empty(0)
    _gated_norm_backward_kernel[(num_sums, heads)](  # pyright: ignore[reportIndexIssue]
        dy.contiguous(),
        o,
        z,
        gain,
        bias if bias is not None else gain,
        do,
        dz,
        dgain,
        dbias,
        num_tokens,
        eps,
        steps=_STEPS,
        **_options(o, bias, activation),
    )
    return do, dz, dgain.sum((0, 1)), dbias.sum(0) if bias is not None else dbias


@_backward.register_fake
def _(dy, o, z, gain, bias, activation, eps):
    dbias = torch.empty_like(bias) if bias is not None else gain.new_empty(0)
    return torch.empty_like(o), torch.empty_like(z), torch.empty_like(gain), dbias


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.activation, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dy: Tensor):
    do, dz, dgain, dbias = _backward(dy, *ctx.saved_tensors, ctx.activation, ctx.eps)
    return do, dz, dgain, dbias if ctx.saved_tensors[3] is not None else None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def gated_norm_fused(
    o_BTHV: Tensor, z_BTHV: Tensor, gain_V: Tensor, bias_HV: Tensor | None, activation: str, eps: float
) -> Tensor:
    """See `ops.gated_norm.gated_norm`; 16-bit inputs, V a power of two."""
    bias = None if bias_HV is None else bias_HV.contiguous()
    return _forward(o_BTHV.contiguous(), z_BTHV.contiguous(), gain_V, bias, activation, eps)
