"""Fused CUDA gradient of a lookup: every row of the table is written once, the output's gradient read once.

A program has some channels of a row and adds up its tokens, usually none or a few. Text repeats some ids thousands of
times: such rows go to programs of few channels and many tokens, the first to start, with as much in flight as others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexttransformer.ops.lookup_gradient.order import LookupOrder


class Shape(NamedTuple):
    """How the work is cut.

    Attributes:
        tokens, channels: a program's step for most rows.
        many: from how many tokens on a row goes to programs of its own.
        many_tokens, many_channels: their step.
        rows: how many rows a program of the first kind has, far apart: frequent ids are neighbours.
        num_warps: of every program.
    """

    tokens: int
    channels: int
    many: int
    many_tokens: int
    many_channels: int
    rows: int
    num_warps: int


_SHAPE = Shape(8, 512, 128, 64, 64, 2, 2)


@triton.jit
def _write_row(
    gradient,
    tokens_N,
    out,
    row,
    first,
    end,
    block,
    stride,
    width,
    tokens: tl.constexpr,
    channels: tl.constexpr,
    parallel: tl.constexpr,
):
    """Writes some channels of a row, the sum over tokens_N[first:end]; `parallel` tokens of a step lie side by side."""
    d = block * channels + tl.arange(0, channels)
    t = tl.arange(0, tokens)
    total = tl.zeros((parallel, channels), dtype=tl.float32)
    for start in range(first, end, tokens):
        inside = start + t < end
        token = tl.load(tokens_N + start + t, mask=inside, other=0).to(tl.int64)
        at = token[:, None] * stride + d[None, :]
        x = tl.load(gradient + at, mask=inside[:, None] & (d < width)[None, :], other=0.0).to(tl.float32)
        # Tokens that a thread has itself; those of others only at the end.
        total += tl.sum(tl.reshape(x, (tokens // parallel, parallel, channels)), 0)
    tl.store(out + row * width + d, tl.sum(total, 0), mask=d < width)


@triton.jit
def _lookup_gradient_kernel(
    gradient,
    tokens_N,
    ids_N,
    starts,
    out,
    num_many,
    num_groups,
    num_rows,
    stride,
    width,
    tokens: tl.constexpr,
    channels: tl.constexpr,
    parallel: tl.constexpr,
    many: tl.constexpr,
    many_tokens: tl.constexpr,
    many_channels: tl.constexpr,
    many_parallel: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_many:
        # A row of that many tokens has at least one at a multiple of `many`; the first of these names it.
        num_blocks = tl.cdiv(width, many_channels)
        place, block = (program // num_blocks) * many, program % num_blocks
        row = tl.load(ids_N + place).to(tl.int64)
        first, end = tl.load(starts + row), tl.load(starts + row + 1)
        if (end - first >= many) & (place - first < many):
            _write_row(
                *(gradient, tokens_N, out, row, first, end, block, stride, width),
                *(many_tokens, many_channels, many_parallel),
            )
    else:
        num_blocks = tl.cdiv(width, channels)
        row, block = ((program - num_many) // num_blocks).to(tl.int64), (program - num_many) % num_blocks
        while row < num_rows:
            first, end = tl.load(starts + row), tl.load(starts + row + 1)
            if end - first < many:
                _write_row(
                    *(gradient, tokens_N, out, row, first, end, block, stride, width), *(tokens, channels, parallel)
                )
            row += num_groups


def _tile(tokens: int, channels: int, width: int, num_warps: int) -> tuple[int, int, int]:
    """Returns tokens and channels of a step at this width, and how many of its tokens lie side by side."""
    channels = min(channels, triton.next_power_of_2(width))
    # A thread reads eight channels at once.
    return tokens, channels, max(1, min(tokens, num_warps * 32 * 8 // channels))


@torch.library.custom_op("nexttransformer::lookup_gradient", mutates_args=())
def _gradient(gradient: Tensor, tokens_N: Tensor, ids_N: Tensor, starts: Tensor) -> Tensor:
    num_rows, width = starts.shape[0] - 1, gradient.shape[-1]
    out = gradient.new_empty((num_rows, width), dtype=torch.float32)
    gradient_ND = gradient.reshape(-1, width)
    if gradient_ND.stride(1) != 1:
        gradient_ND = gradient_ND.contiguous()
    tokens, channels, parallel = _tile(_SHAPE.tokens, _SHAPE.channels, width, _SHAPE.num_warps)
    many_tokens, many_channels, many_parallel = _tile(_SHAPE.many_tokens, _SHAPE.many_channels, width, _SHAPE.num_warps)
    num_many = triton.cdiv(tokens_N.shape[0], _SHAPE.many) * triton.cdiv(width, many_channels)
    num_groups = triton.cdiv(num_rows, _SHAPE.rows)
    _lookup_gradient_kernel[(num_many + num_groups * triton.cdiv(width, channels),)](  # pyright: ignore[reportIndexIssue]
        gradient_ND,
        tokens_N,
        ids_N,
        starts,
        out,
        num_many,
        num_groups,
        num_rows,
        gradient_ND.stride(0),
        width,
        tokens=tokens,
        channels=channels,
        parallel=parallel,
        many=_SHAPE.many,
        many_tokens=many_tokens,
        many_channels=many_channels,
        many_parallel=many_parallel,
        num_warps=_SHAPE.num_warps,
    )
    return out


@_gradient.register_fake
def _(gradient, tokens_N, ids_N, starts):
    return gradient.new_empty((starts.shape[0] - 1, gradient.shape[-1]), dtype=torch.float32)


def lookup_gradient_fused(gradient: Tensor, order: LookupOrder) -> Tensor:
    """Returns the gradient [V, D] (float32) of a table whose rows were looked up, from that of the output [..., D]."""
    return _gradient(gradient, *order)
