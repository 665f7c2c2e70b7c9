"""Fused CUDA form: one pass forward, one pass backward straight into the gradient of the joint product.

Only the product itself is kept for the backward pass. P counts (token, head) pairs, J = K / 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexttransformer.ops.norm import NORM_EPS

_PAIRS_PER_PROGRAM = 16


@triton.jit
def _turn(x1, x2, cos, sin):
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


@triton.jit
def _forward_one(source, target, offsets, out_offsets, half: tl.constexpr, cos, sin, gain, eps, inside):
    x1 = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + offsets + half, mask=inside, other=0.0).to(tl.float32)
    r1, r2 = _turn(x1, x2, cos, sin)
    mean = (tl.sum(r1 * r1, 1) + tl.sum(r2 * r2, 1)) / (2 * half)
    scale = (gain * tl.rsqrt(mean + eps))[:, None]
    kind = target.dtype.element_ty
    tl.store(target + out_offsets, (r1 * scale).to(kind), mask=inside)
    tl.store(target + out_offsets + half, (r2 * scale).to(kind), mask=inside)


@triton.jit
def _rotary_forward_kernel(
    qkv,
    cos_table,
    sin_table,
    row,
    factor,
    q_out,
    k_out,
    v_out,
    num_pairs,
    num_tokens,
    gain,
    eps,
    heads: tl.constexpr,
    half: tl.constexpr,
    pairs: tl.constexpr,
    has_row: tl.constexpr,
):
    pair = (tl.program_id(0) * pairs + tl.arange(0, pairs)).to(tl.int64)
    j = tl.arange(0, half)
    inside = (pair < num_pairs)[:, None] & (j < half)[None, :]
    width: tl.constexpr = heads * 2 * half
    token = pair // heads
    offsets = (token * (3 * width) + (pair % heads) * (2 * half))[:, None] + j[None, :]
    out_offsets = (pair * (2 * half))[:, None] + j[None, :]
    angle = ((token % num_tokens) * half)[:, None] + j[None, :]
    cos = tl.load(cos_table + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + angle, mask=inside, other=0.0).to(tl.float32)
    _forward_one(qkv, q_out, offsets, out_offsets, half, cos, sin, gain, eps, inside)
    _forward_one(qkv + width, k_out, offsets, out_offsets, half, cos, sin, gain, eps, inside)
    v1 = tl.load(qkv + 2 * width + offsets, mask=inside, other=0.0).to(tl.float32)
    v2 = tl.load(qkv + 2 * width + offsets + half, mask=inside, other=0.0).to(tl.float32)
    if has_row:
        weight = tl.load(factor + pair, mask=pair < num_pairs, other=0.0)[:, None]
        v1 += weight * tl.load(row + out_offsets, mask=inside, other=0.0).to(tl.float32)
        v2 += weight * tl.load(row + out_offsets + half, mask=inside, other=0.0).to(tl.float32)
    kind = v_out.dtype.element_ty
    tl.store(v_out + out_offsets, v1.to(kind), mask=inside)
    tl.store(v_out + out_offsets + half, v2.to(kind), mask=inside)


@triton.jit
def _backward_one(source, gradient, target, offsets, grad_offsets, half: tl.constexpr, cos, sin, gain, eps, inside):
    x1 = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + offsets + half, mask=inside, other=0.0).to(tl.float32)
    g1 = tl.load(gradient + grad_offsets, mask=inside, other=0.0).to(tl.float32)
    g2 = tl.load(gradient + grad_offsets + half, mask=inside, other=0.0).to(tl.float32)
    r1, r2 = _turn(x1, x2, cos, sin)
    inverse = tl.rsqrt((tl.sum(r1 * r1, 1) + tl.sum(r2 * r2, 1)) / (2 * half) + eps)
    dot = (tl.sum(r1 * g1, 1) + tl.sum(r2 * g2, 1)) / (2 * half)
    scale = (gain * inverse)[:, None]
    pull = (dot * inverse * inverse)[:, None]
    d1 = scale * (g1 - r1 * pull)
    d2 = scale * (g2 - r2 * pull)
    kind = target.dtype.element_ty
    # The transposed rotation.
    tl.store(target + offsets, (d1 * cos - d2 * sin).to(kind), mask=inside)
    tl.store(target + offsets + half, (d1 * sin + d2 * cos).to(kind), mask=inside)


@triton.jit
def _rotary_backward_kernel(
    qkv,
    cos_table,
    sin_table,
    row,
    factor,
    dq,
    dk,
    dv,
    dqkv,
    drow,
    dfactor,
    num_pairs,
    num_tokens,
    gain,
    eps,
    heads: tl.constexpr,
    half: tl.constexpr,
    pairs: tl.constexpr,
    has_row: tl.constexpr,
):
    pair = (tl.program_id(0) * pairs + tl.arange(0, pairs)).to(tl.int64)
    j = tl.arange(0, half)
    inside = (pair < num_pairs)[:, None] & (j < half)[None, :]
    width: tl.constexpr = heads * 2 * half
    token = pair // heads
    offsets = (token * (3 * width) + (pair % heads) * (2 * half))[:, None] + j[None, :]
    grad_offsets = (pair * (2 * half))[:, None] + j[None, :]
    angle = ((token % num_tokens) * half)[:, None] + j[None, :]
    cos = tl.load(cos_table + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + angle, mask=inside, other=0.0).to(tl.float32)
    _backward_one(qkv, dq, dqkv, offsets, grad_offsets, half, cos, sin, gain, eps, inside)
    _backward_one(qkv + width, dk, dqkv + width, offsets, grad_offsets, half, cos, sin, gain, eps, inside)
    g1 = tl.load(dv + grad_offsets, mask=inside, other=0.0)
    g2 = tl.load(dv + grad_offsets + half, mask=inside, other=0.0)
    tl.store(dqkv + 2 * width + offsets, g1, mask=inside)
    tl.store(dqkv + 2 * width + offsets + half, g2, mask=inside)
    if has_row:
        weight = tl.load(factor + pair, mask=pair < num_pairs, other=0.0)[:, None]
        g1 = g1.to(tl.float32)
        g2 = g2.to(tl.float32)
        e1 = tl.load(row + grad_offsets, mask=inside, other=0.0).to(tl.float32)
        e2 = tl.load(row + grad_offsets + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(dfactor + pair, tl.sum(g1 * e1, 1) + tl.sum(g2 * e2, 1), mask=pair < num_pairs)
        kind = drow.dtype.element_ty
        tl.store(drow + grad_offsets, (weight * g1).to(kind), mask=inside)
        tl.store(drow + grad_offsets + half, (weight * g2).to(kind), mask=inside)


def _grid(num_pairs: int) -> tuple[int]:
    return (triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM),)


@torch.library.custom_op("nexttransformer::rotary_heads", mutates_args=())
def _forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, row: Tensor | None, factor: Tensor | None, num_heads: int, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_tokens, width3 = qkv.shape
    head_dim = width3 // (3 * num_heads)
    q, k, v = (qkv.new_empty(batch, num_tokens, num_heads, head_dim) for _ in range(3))
    num_pairs = batch * num_tokens * num_heads
    _rotary_forward_kernel[_grid(num_pairs)](  # pyright: ignore[reportIndexIssue]
        qkv,
        cos,
        sin,
        row if row is not None else qkv,
        factor if factor is not None else qkv,
        q,
        k,
        v,
        num_pairs,
        num_tokens,
        gain,
        NORM_EPS,
        heads=num_heads,
        half=head_dim // 2,
        pairs=_PAIRS_PER_PROGRAM,
        has_row=row is not None,
        num_warps=4,
    )
    return q, k, v


@_forward.register_fake
def _(qkv, cos, sin, row, factor, num_heads, gain):
    batch, num_tokens, width3 = qkv.shape
    shape = (batch, num_tokens, num_heads, width3 // (3 * num_heads))
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@torch.library.custom_op("nexttransformer::rotary_heads_backward", mutates_args=())
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    row: Tensor | None,
    factor: Tensor | None,
    num_heads: int,
    gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_tokens, width3 = qkv.shape
    head_dim = width3 // (3 * num_heads)
    num_pairs = batch * num_tokens * num_heads
    dqkv = torch.empty_like(qkv)
    has_row = row is not None
    drow = torch.empty_like(row) if row is not None else qkv.new_empty(0)
    dfactor = torch.empty_like(factor) if factor is not None else qkv.new_empty(0, dtype=torch.float32)
    _rotary_backward_kernel[_grid(num_pairs)](  # pyright: ignore[reportIndexIssue]
        qkv,
        cos,
        sin,
        row if has_row else qkv,
        factor if has_row else qkv,
        dq.contiguous(),
        dk.contiguous(),
        dv.contiguous(),
        dqkv,
        drow,
        dfactor,
        num_pairs,
        num_tokens,
        gain,
        NORM_EPS,
        heads=num_heads,
        half=head_dim // 2,
        pairs=_PAIRS_PER_PROGRAM,
        has_row=has_row,
        num_warps=4,
    )
    return dqkv, drow, dfactor


@_backward.register_fake
def _(dq, dk, dv, qkv, cos, sin, row, factor, num_heads, gain):
    if row is None:
        return torch.empty_like(qkv), qkv.new_empty(0), qkv.new_empty(0, dtype=torch.float32)
    return torch.empty_like(qkv), torch.empty_like(row), torch.empty_like(factor)


def _setup(ctx, inputs, output) -> None:
    qkv, cos, sin, row, factor, num_heads, gain = inputs
    ctx.save_for_backward(qkv, cos, sin, row, factor)
    ctx.num_heads, ctx.gain = num_heads, gain


def _autograd(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
    qkv, cos, sin, row, factor = ctx.saved_tensors
    dqkv, drow, dfactor = _backward(dq, dk, dv, qkv, cos, sin, row, factor, ctx.num_heads, ctx.gain)
    if row is None:
        return dqkv, None, None, None, None, None, None
    return dqkv, None, None, drow, dfactor, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def rotary_heads_fused(
    qkv: Tensor, cos: Tensor, sin: Tensor, row: Tensor | None, factor: Tensor | None, num_heads: int, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.rotary_heads.rotary_heads`; 16-bit inputs, K a power of two."""
    row = row.contiguous() if row is not None else None
    factor = factor.contiguous() if factor is not None else None
    return _forward(qkv.contiguous(), cos.contiguous(), sin.contiguous(), row, factor, num_heads, gain)
