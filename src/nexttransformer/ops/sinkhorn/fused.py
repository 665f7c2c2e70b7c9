"""Fused CUDA form: a program has the matrices of some tokens in registers. R counts matrices.

Left to the compiler every normalization is a kernel of its own, forty for one sublayer and pass. Backward the rounds
are computed once more; the sums by which they divided go to a scratch buffer, so that each division can be undone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _WARPS = 32, 1


@triton.jit
def _normalized(m, axis: tl.constexpr):
    """Returns m [tokens, s, t] divided by its sums over an axis, and the sums; those of padding are 1."""
    total = tl.sum(m, axis)
    total = tl.where(total > 0, total, 1.0)
    return m / tl.expand_dims(total, axis), total


@triton.jit
def _softmax(logits, at, inside, eps):
    """Returns the softmax over t plus eps, 0 in padding."""
    x = tl.load(logits + at, mask=inside, other=0.0)
    largest = tl.max(tl.where(inside, x, float("-inf")), 2)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    e = tl.where(inside, tl.exp(x - tl.expand_dims(largest, 2)), 0.0)
    m, _ = _normalized(e, 2)
    return tl.where(inside, m + eps, 0.0)


@triton.jit
def _places(num_tokens, size: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr):
    """Returns offsets into [R, N, N] and what of them exists, [tokens, s, t]; then token numbers and n."""
    token = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    n = tl.arange(0, padded)
    s, t = n[None, :, None], n[None, None, :]
    inside = (token < num_tokens)[:, None, None] & (s < size) & (t < size)
    return token[:, None, None] * (size * size) + s * size + t, inside, token, n


@triton.jit
def _sinkhorn_forward_kernel(
    logits, out, num_tokens, num_rounds, eps, size: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr
):
    at, inside, _, _ = _places(num_tokens, size, padded, tokens)
    m, _ = _normalized(_softmax(logits, at, inside, eps), 1)
    for _ in range(num_rounds - 1):
        m, _ = _normalized(m, 2)
        m, _ = _normalized(m, 1)
    tl.store(out + at, m, mask=inside)


@triton.jit
def _undone(m, gradient, total, axis: tl.constexpr):
    """Returns what was divided by its sums over an axis to give m, and its gradient."""
    inner = tl.sum(m * gradient, axis)
    divisor = tl.expand_dims(total, axis)
    return m * divisor, (gradient - tl.expand_dims(inner, axis)) / divisor


@triton.jit
def _sinkhorn_backward_kernel(
    gradient,
    logits,
    dlogits,
    scratch,
    num_tokens,
    num_rounds,
    eps,
    size: tl.constexpr,
    padded: tl.constexpr,
    tokens: tl.constexpr,
):
    at, inside, token, n = _places(num_tokens, size, padded, tokens)
    # Sums of [tokens, n] for each normalization, in order.
    place = (token[:, None] - tl.program_id(0).to(tl.int64) * tokens) * padded + n[None, :]
    step: tl.constexpr = tokens * padded
    place += tl.program_id(0).to(tl.int64) * (2 * num_rounds - 1) * step
    start = _softmax(logits, at, inside, eps)
    m, first = _normalized(start, 1)
    for i in range(num_rounds - 1):
        m, rows = _normalized(m, 2)
        tl.store(scratch + place + 2 * i * step, rows)
        m, columns = _normalized(m, 1)
        tl.store(scratch + place + (2 * i + 1) * step, columns)
    tl.debug_barrier()
    g = tl.load(gradient + at, mask=inside, other=0.0)
    for done in range(num_rounds - 1):
        i = num_rounds - 2 - done
        m, g = _undone(m, g, tl.load(scratch + place + (2 * i + 1) * step), 1)
        m, g = _undone(m, g, tl.load(scratch + place + 2 * i * step), 2)
    _, g = _undone(m, g, first, 1)
    p = tl.where(inside, start - eps, 0.0)
    tl.store(dlogits + at, p * (g - tl.expand_dims(tl.sum(p * g, 2), 2)), mask=inside)


def _launch(logits: Tensor) -> tuple[int, int, dict[str, int]]:
    """Returns number of matrices, number of programs, and the kernels' options."""
    size = logits.shape[-1]
    num_tokens = logits.numel() // (size * size)
    options = {"size": size, "padded": triton.next_power_of_2(size), "tokens": _TOKENS, "num_warps": _WARPS}
    return num_tokens, triton.cdiv(num_tokens, _TOKENS), options


@torch.library.custom_op("nexttransformer::sinkhorn", mutates_args=())
def _forward(logits: Tensor, num_rounds: int, eps: float) -> Tensor:
    out = torch.empty_like(logits)
    num_tokens, num_programs, options = _launch(logits)
    _sinkhorn_forward_kernel[(num_programs,)](  # pyright: ignore[reportIndexIssue]
        logits, out, num_tokens, num_rounds, eps, **options
    )
    return out


@_forward.register_fake
def _(logits, num_rounds, eps):
    return torch.empty_like(logits)


@torch.library.custom_op("nexttransformer::sinkhorn_backward", mutates_args=())
def _backward(gradient: Tensor, logits: Tensor, num_rounds: int, eps: float) -> Tensor:
    dlogits = torch.empty_like(logits)
    num_tokens, num_programs, options = _launch(logits)
    scratch = logits.new_empty(num_programs, 2 * num_rounds - 1, options["tokens"], options["padded"])
    _sinkhorn_backward_kernel[(num_programs,)](  # pyright: ignore[reportIndexIssue]
        gradient.contiguous(), logits, dlogits, scratch, num_tokens, num_rounds, eps, **options
    )
    return dlogits


@_backward.register_fake
def _(gradient, logits, num_rounds, eps):
    return torch.empty_like(logits)


def _setup(ctx, inputs, output) -> None:
    logits, ctx.num_rounds, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _autograd(ctx, gradient: Tensor):
    (logits,) = ctx.saved_tensors
    return _backward(gradient, logits, ctx.num_rounds, ctx.eps), None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def sinkhorn_fused(logits: Tensor, num_rounds: int, eps: float) -> Tensor:
    """See `ops.sinkhorn.sinkhorn`."""
    return _forward(logits.contiguous(), num_rounds, eps)
