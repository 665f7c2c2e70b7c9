"""Fused CUDA form: one pass forward, two passes backward, which keep only the product itself and the weights.

The first backward pass recomputes the convolution and writes the gradient of its result (dy); the second convolves dy
backward in time and sums the weights' gradients. One pass would have to recompute each dy once for every tap.
A program handles tokens of one row and one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexttransformer.ops.convolved_heads.naive import UNIT_EPS

_TOKENS = 16
# The second backward pass: tokens a program adds up for the weights, in steps.
_SUMMED_TOKENS = 512
_STEP_TOKENS = 8


@triton.jit
def _convolve(source, weight, t, channel, stride, keep, taps: tl.constexpr):
    """Returns the convolution at tokens t of one row; `source` points to the row's first token."""
    total = tl.zeros((t.shape[0], channel.shape[0]), dtype=tl.float32)
    for j in tl.static_range(taps):
        past = t - (taps - 1) + j
        inside = (past >= 0)[:, None] & keep
        x = tl.load(source + past[:, None] * stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(weight + channel * taps + j)[None, :]
    return total


@triton.jit
def _forward_kernel(
    qkv,
    weight,
    row,
    factor,
    q_out,
    k_out,
    v_out,
    num_tokens,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    taps: tl.constexpr,
    tokens: tl.constexpr,
    has_row: tl.constexpr,
):
    t = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * num_tokens
    width: tl.constexpr = heads * dim
    keep = (t < num_tokens)[:, None]
    lane = tl.arange(0, dim)
    source = qkv + first * (3 * width)
    out = (first + t)[:, None] * width + (head * dim + lane)[None, :]
    kind = q_out.dtype.element_ty
    for role in tl.static_range(3):
        y = _convolve(source, weight, t, role * width + head * dim + lane, 3 * width, keep, taps)
        h = y * tl.sigmoid(y)
        if role == 2:
            if has_row:
                amount = tl.load(factor + (first + t) * heads + head, mask=t < num_tokens, other=0.0)[:, None]
                h += amount * tl.load(row + out, mask=keep, other=0.0).to(tl.float32)
            tl.store(v_out + out, h.to(kind), mask=keep)
        else:
            h *= tl.rsqrt(tl.sum(h * h, 1) + eps)[:, None]
            if role == 0:
                tl.store(q_out + out, h.to(kind), mask=keep)
            else:
                tl.store(k_out + out, h.to(kind), mask=keep)


@triton.jit
def _inner_backward_kernel(
    qkv,
    weight,
    row,
    factor,
    dq,
    dk,
    dv,
    dy_out,
    drow,
    dfactor,
    num_tokens,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    taps: tl.constexpr,
    tokens: tl.constexpr,
    has_row: tl.constexpr,
):
    """Writes the gradient of the convolution's result, and those of row and factor."""
    t = (tl.program_id(0) * tokens + tl.arange(0, tokens)).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * num_tokens
    width: tl.constexpr = heads * dim
    keep = (t < num_tokens)[:, None]
    lane = tl.arange(0, dim)
    source = qkv + first * (3 * width)
    at = (first + t)[:, None] * width + (head * dim + lane)[None, :]
    kind = dy_out.dtype.element_ty
    for role in tl.static_range(3):
        channel = role * width + head * dim + lane
        y = _convolve(source, weight, t, channel, 3 * width, keep, taps)
        gate = tl.sigmoid(y)
        if role == 2:
            g = tl.load(dv + at, mask=keep, other=0.0).to(tl.float32)
            if has_row:
                place = (first + t) * heads + head
                amount = tl.load(factor + place, mask=t < num_tokens, other=0.0)[:, None]
                e = tl.load(row + at, mask=keep, other=0.0).to(tl.float32)
                tl.store(dfactor + place, tl.sum(g * e, 1), mask=t < num_tokens)
                tl.store(drow + at, (amount * g).to(kind), mask=keep)
        else:
            if role == 0:
                g = tl.load(dq + at, mask=keep, other=0.0).to(tl.float32)
            else:
                g = tl.load(dk + at, mask=keep, other=0.0).to(tl.float32)
            h = y * gate
            scale = tl.rsqrt(tl.sum(h * h, 1) + eps)[:, None]
            unit = h * scale
            g = scale * (g - unit * tl.sum(g * unit, 1)[:, None])
        # The derivative of y sigmoid(y).
        dy = g * gate * (1.0 + y * (1.0 - gate))
        tl.store(dy_out + (first + t)[:, None] * (3 * width) + channel[None, :], dy.to(kind), mask=keep)


@triton.jit
def _outer_backward_kernel(
    qkv,
    weight,
    dy,
    dqkv,
    dweight,
    num_tokens,
    num_channels,
    dim: tl.constexpr,
    summed: tl.constexpr,
    step: tl.constexpr,
):
    """Writes the gradient of the product, and for this program's tokens of one row the sum for each of four taps."""
    channel = tl.program_id(1) * dim + tl.arange(0, dim)
    first = tl.program_id(2).to(tl.int64) * num_tokens * num_channels
    w0 = tl.load(weight + channel * 4)[None, :]
    w1 = tl.load(weight + channel * 4 + 1)[None, :]
    w2 = tl.load(weight + channel * 4 + 2)[None, :]
    w3 = tl.load(weight + channel * 4 + 3)[None, :]
    d0 = tl.zeros((step, dim), dtype=tl.float32)
    d1 = tl.zeros((step, dim), dtype=tl.float32)
    d2 = tl.zeros((step, dim), dtype=tl.float32)
    d3 = tl.zeros((step, dim), dtype=tl.float32)
    kind = dqkv.dtype.element_ty
    for start in range(0, summed, step):
        t = (tl.program_id(0) * summed + start + tl.arange(0, step)).to(tl.int64)[:, None]
        at = first + t * num_channels + channel[None, :]
        x = tl.load(qkv + at, mask=t < num_tokens, other=0.0).to(tl.float32)
        # Input t was multiplied by tap 3 for output t, by tap 2 for output t + 1, and so on.
        g3 = tl.load(dy + at, mask=t < num_tokens, other=0.0).to(tl.float32)
        g2 = tl.load(dy + at + num_channels, mask=t + 1 < num_tokens, other=0.0).to(tl.float32)
        g1 = tl.load(dy + at + 2 * num_channels, mask=t + 2 < num_tokens, other=0.0).to(tl.float32)
        g0 = tl.load(dy + at + 3 * num_channels, mask=t + 3 < num_tokens, other=0.0).to(tl.float32)
        dx = w0 * g0 + w1 * g1 + w2 * g2 + w3 * g3
        tl.store(dqkv + at, dx.to(kind), mask=t < num_tokens)
        d0 += x * g0
        d1 += x * g1
        d2 += x * g2
        d3 += x * g3
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    out = dweight + (program.to(tl.int64) * num_channels + channel) * 4
    tl.store(out, tl.sum(d0, 0))
    tl.store(out + 1, tl.sum(d1, 0))
    tl.store(out + 2, tl.sum(d2, 0))
    tl.store(out + 3, tl.sum(d3, 0))


@torch.library.custom_op("nexttransformer::convolved_heads", mutates_args=())
def _forward(
    qkv: Tensor, weight: Tensor, row: Tensor | None, factor: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_tokens, channels = qkv.shape
    head_dim = channels // (3 * num_heads)
    q, k, v = (qkv.new_empty(batch, num_tokens, num_heads, head_dim) for _ in range(3))
    _forward_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads, batch)](  # pyright: ignore[reportIndexIssue]
        qkv,
        weight,
        row if row is not None else qkv,
        factor if factor is not None else weight,
        q,
        k,
        v,
        num_tokens,
        UNIT_EPS,
        heads=num_heads,
        dim=head_dim,
        taps=weight.shape[1],
        tokens=_TOKENS,
        has_row=row is not None,
        num_warps=4,
    )
    return q, k, v


@_forward.register_fake
def _(qkv, weight, row, factor, num_heads):
    batch, num_tokens, channels = qkv.shape
    shape = (batch, num_tokens, num_heads, channels // (3 * num_heads))
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@torch.library.custom_op("nexttransformer::convolved_heads_backward", mutates_args=())
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    weight: Tensor,
    row: Tensor | None,
    factor: Tensor | None,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_tokens, channels = qkv.shape
    head_dim = channels // (3 * num_heads)
    has_row = row is not None
    dy, dqkv = torch.empty_like(qkv), torch.empty_like(qkv)
    drow = torch.empty_like(row) if row is not None else qkv.new_empty(0)
    dfactor = torch.empty_like(factor) if factor is not None else weight.new_empty(0)
    _inner_backward_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads, batch)](  # pyright: ignore[reportIndexIssue]
        qkv,
        weight,
        row if has_row else qkv,
        factor if has_row else weight,
        dq.contiguous(),
        dk.contiguous(),
        dv.contiguous(),
        dy,
        drow,
        dfactor,
        num_tokens,
        UNIT_EPS,
        heads=num_heads,
        dim=head_dim,
        taps=weight.shape[1],
        tokens=_TOKENS,
        has_row=has_row,
        num_warps=4,
    )
    num_sums = triton.cdiv(num_tokens, _SUMMED_TOKENS)
    dweight = weight.new_empty(batch * num_sums, *weight.shape)
    _outer_backward_kernel[(num_sums, 3 * num_heads, batch)](  # pyright: ignore[reportIndexIssue]
        qkv,
        weight,
        dy,
        dqkv,
        dweight,
        num_tokens,
        channels,
        dim=head_dim,
        summed=_SUMMED_TOKENS,
        step=_STEP_TOKENS,
        num_warps=4,
    )
    return dqkv, dweight.sum(0), drow, dfactor


@_backward.register_fake
def _(dq, dk, dv, qkv, weight, row, factor, num_heads):
    dqkv, dweight = torch.empty_like(qkv), torch.empty_like(weight)
    if row is None:
        return dqkv, dweight, qkv.new_empty(0), weight.new_empty(0)
    return dqkv, dweight, torch.empty_like(row), torch.empty_like(factor)


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.num_heads = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
    dqkv, dweight, drow, dfactor = _backward(dq, dk, dv, *ctx.saved_tensors, ctx.num_heads)
    has_row = ctx.saved_tensors[2] is not None
    return dqkv, dweight, drow if has_row else None, dfactor if has_row else None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def convolved_heads_fused(
    qkv: Tensor, weight: Tensor, row: Tensor | None, factor: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.convolved_heads.convolved_heads`; 16-bit inputs, K a power of two, four taps, no cache."""
    assert weight.shape[1] == 4, "the backward pass is written for four taps"
    row = row.contiguous() if row is not None else None
    factor = factor.contiguous() if factor is not None else None
    return _forward(qkv.contiguous(), weight.contiguous(), row, factor, num_heads)
