"""Fused CUDA form: one pass each way, which keeps only the product itself and the weights for the backward pass.

A program handles tokens of one row and one head. Backward it recomputes the convolution, and goes through its tokens
one by one, so that each input and upstream gradient is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexttransformer.ops.convolved_heads.naive import UNIT_EPS

_TOKENS = 16
# Backward: pieces that a program goes through side by side, tokens of a piece (a multiple of 3), warps.
_CHUNKS, _LENGTH, _BACKWARD_WARPS = 2, 57, 1


@triton.jit
def _sigmoid(x):
    """The square of an inverse root takes fewer instructions than a division."""
    root = tl.rsqrt(1.0 + tl.exp(-x))
    return root * root


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
def _convolved_forward_kernel(
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
        h = y * _sigmoid(y)
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
def _past_row(source, t, channel, stride, num_tokens):
    """Returns the channels of tokens t [chunks], zeros outside the row."""
    inside = ((t >= 0) & (t < num_tokens))[:, None]
    return tl.load(source + t[:, None] * stride + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _convolved_backward_kernel(
    qkv,
    weight,
    row,
    factor,
    dq,
    dk,
    dv,
    dqkv,
    drow,
    dfactor,
    dweight,
    num_tokens,
    eps,
    heads: tl.constexpr,
    dim: tl.constexpr,
    chunks: tl.constexpr,
    length: tl.constexpr,
    is_value: tl.constexpr,
    has_row: tl.constexpr,
):
    """Goes backward in time through `chunks` pieces of `length` tokens of one row and head, all at the same pace.

    Four inputs and the gradients dy of the convolution's last four results stay in registers: dy of token t needs
    inputs t - 3 to t, and the gradient of input t needs dy of tokens t to t + 3. A piece therefore starts with the
    three tokens after it, whose dy it computes once more.
    """
    width: tl.constexpr = heads * dim
    index = tl.program_id(1)
    role = index // heads + (2 if is_value else 0)
    head = index % heads
    lane = tl.arange(0, dim)
    channel = role * width + head * dim + lane
    first = tl.program_id(2).to(tl.int64) * num_tokens
    source = qkv + first * (3 * width)
    target = dqkv + first * (3 * width)
    begin = ((tl.program_id(0) * chunks + tl.arange(0, chunks)) * length).to(tl.int64)
    w0 = tl.load(weight + channel * 4)[None, :]
    w1 = tl.load(weight + channel * 4 + 1)[None, :]
    w2 = tl.load(weight + channel * 4 + 2)[None, :]
    w3 = tl.load(weight + channel * 4 + 3)[None, :]
    d0 = tl.zeros((chunks, dim), dtype=tl.float32)
    d1 = tl.zeros((chunks, dim), dtype=tl.float32)
    d2 = tl.zeros((chunks, dim), dtype=tl.float32)
    d3 = tl.zeros((chunks, dim), dtype=tl.float32)
    # dy of the three tokens after t.
    later1 = tl.zeros((chunks, dim), dtype=tl.float32)
    later2 = tl.zeros((chunks, dim), dtype=tl.float32)
    later3 = tl.zeros((chunks, dim), dtype=tl.float32)
    last = begin + length + 2
    x3 = _past_row(source, last, channel, 3 * width, num_tokens).to(tl.float32)
    x2 = _past_row(source, last - 1, channel, 3 * width, num_tokens).to(tl.float32)
    x1 = _past_row(source, last - 2, channel, 3 * width, num_tokens).to(tl.float32)
    kind = dqkv.dtype.element_ty
    if is_value:
        upstream = dv
    else:
        upstream = dq if role == 0 else dk
    upstream += first * width + head * dim
    # Loaded three steps ahead.
    ahead_x1 = _past_row(source, last - 3, channel, 3 * width, num_tokens)
    ahead_x2 = _past_row(source, last - 4, channel, 3 * width, num_tokens)
    ahead_x3 = _past_row(source, last - 5, channel, 3 * width, num_tokens)
    ahead_g1 = _past_row(upstream, last, lane, width, num_tokens)
    ahead_g2 = _past_row(upstream, last - 1, lane, width, num_tokens)
    ahead_g3 = _past_row(upstream, last - 2, lane, width, num_tokens)
    # Three steps at a time: then every register holds again what it held before, and none is copied.
    for i0 in range(0, length + 3, 3):
        for j in tl.static_range(3):
            i = i0 + j
            t = last - i
            x0, g = ahead_x1.to(tl.float32), ahead_g1.to(tl.float32)
            ahead_x1, ahead_x2, ahead_g1, ahead_g2 = ahead_x2, ahead_x3, ahead_g2, ahead_g3
            ahead_x3 = _past_row(source, t - 6, channel, 3 * width, num_tokens)
            ahead_g3 = _past_row(upstream, t - 3, lane, width, num_tokens)
            is_own = (i >= 3) & (t < num_tokens)
            y = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            gate = _sigmoid(y)
            h = y * gate
            if is_value:
                if has_row:
                    place = (first + t) * heads + head
                    at = (first + t)[:, None] * width + (head * dim + lane)[None, :]
                    amount = tl.load(factor + place, mask=is_own, other=0.0)[:, None]
                    e = tl.load(row + at, mask=is_own[:, None], other=0.0).to(tl.float32)
                    tl.store(dfactor + place, tl.sum(g * e, 1), mask=is_own)
                    tl.store(drow + at, (amount * g).to(kind), mask=is_own[:, None])
            else:
                # The derivative of unit length, with two sums that do not wait for each other.
                scale = tl.rsqrt(tl.sum(h * h, 1) + eps)
                along = tl.sum(g * h, 1) * (scale * scale * scale)
                g = scale[:, None] * g - along[:, None] * h
            # The derivative of y sigmoid(y).
            dy = g * (gate + (h - h * gate))
            dx = w3 * dy + w2 * later1 + w1 * later2 + w0 * later3
            tl.store(target + t[:, None] * (3 * width) + channel[None, :], dx.to(kind), mask=is_own[:, None])
            own = tl.where(is_own[:, None], dy, 0.0)
            d0 += own * x0
            d1 += own * x1
            d2 += own * x2
            d3 += own * x3
            later3, later2, later1 = later2, later1, dy
            x3, x2, x1 = x2, x1, x0
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    out = dweight + (program.to(tl.int64) * (3 * width) + channel) * 4
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
    _convolved_forward_kernel[(triton.cdiv(num_tokens, _TOKENS), num_heads, batch)](  # pyright: ignore[reportIndexIssue]
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
    dqkv = torch.empty_like(qkv)
    drow = torch.empty_like(row) if row is not None else qkv.new_empty(0)
    dfactor = torch.empty_like(factor) if factor is not None else weight.new_empty(0)
    upstream = [gradient.contiguous() for gradient in (dq, dk, dv)]
    num_sums = triton.cdiv(num_tokens, _CHUNKS * _LENGTH)
    dweight = weight.new_empty(batch * num_sums, *weight.shape)
    for is_value, num_roles in ((False, 2), (True, 1)):
        _convolved_backward_kernel[(num_sums, num_roles * num_heads, batch)](  # pyright: ignore[reportIndexIssue]
            qkv,
            weight,
            row if has_row else qkv,
            factor if has_row else weight,
            *upstream,
            dqkv,
            drow,
            dfactor,
            dweight,
            num_tokens,
            UNIT_EPS,
            heads=num_heads,
            dim=head_dim,
            chunks=_CHUNKS,
            length=_LENGTH,
            is_value=is_value,
            has_row=has_row,
            num_warps=_BACKWARD_WARPS,
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
    assert _LENGTH % 3 == 0, "the backward pass takes three steps at a time, and would leave its piece"
    row = row.contiguous() if row is not None else None
    factor = factor.contiguous() if factor is not None else None
    return _forward(qkv.contiguous(), weight.contiguous(), row, factor, num_heads)
