"""Fused CUDA form: one pass over the streams each way; a program has one token. R counts tokens.

Compiled from plain PyTorch the new streams are computed again in every kernel that reads them. The gradient of the
squared norms is added outside, where it joins what other readers of the streams contribute.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nexttransformer.ops.stream_write.naive import Scaling

# Channels of a step and warps, the best measured on an H200. Forward a thread holds its channels of every stream, so
# that sums over streams stay in it. Backward the sums for every pair of streams would not fit its registers; streams
# lie across threads, and several warps would meet in shared memory at every step (3.9 instead of 0.8 ms).
_FORWARD_SHAPE, _BACKWARD_SHAPE = (512, 2), (128, 1)


@triton.jit
def _stream_forward_kernel(
    streams,
    y,
    res,
    post,
    lambda_,
    mu,
    x0,
    new,
    squares,
    width,
    num_streams: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_mixing: tl.constexpr,
    has_scaling: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, padded)
    is_stream = s < num_streams
    post_N = tl.load(post + token * num_streams + s, mask=is_stream, other=0.0)
    if has_mixing:
        pair = s[:, None] * num_streams + s[None, :]
        is_pair = is_stream[:, None] & is_stream[None, :]
        res_NN = tl.load(res + token * (num_streams * num_streams) + pair, mask=is_pair, other=0.0)
    total = tl.zeros((padded, block), dtype=tl.float32)
    kind = new.dtype.element_ty
    for start in range(0, width, block):
        d = start + tl.arange(0, block)
        inside = is_stream[:, None] & (d < width)[None, :]
        at = token * (num_streams * width) + s[:, None] * width + d[None, :]
        x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        if has_mixing:
            x = tl.sum(res_NN[:, :, None] * x[:, None, :], axis=0)
        x += post_N[:, None] * tl.load(y + token * width + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        if has_scaling:
            x *= tl.load(lambda_)
            x += tl.load(mu) * tl.load(x0 + token * width + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        rounded = x.to(kind)
        tl.store(new + at, rounded, mask=inside)
        exact = tl.where(inside, rounded.to(tl.float32), 0.0)
        total += exact * exact
    tl.store(squares + token * num_streams + s, tl.sum(total, 1), mask=is_stream)


@triton.jit
def _stream_backward_kernel(
    gradient,
    streams,
    y,
    res,
    post,
    lambda_,
    mu,
    x0,
    dstreams,
    dy,
    dres,
    dpost,
    dlambda,
    dmu,
    dx0,
    width,
    num_streams: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    has_mixing: tl.constexpr,
    has_scaling: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, padded)
    is_stream = s < num_streams
    post_N = tl.load(post + token * num_streams + s, mask=is_stream, other=0.0)
    pair = s[:, None] * num_streams + s[None, :]
    is_pair = is_stream[:, None] & is_stream[None, :]
    # Products of old stream s and the gradient of new stream t; without mixing only s = t.
    if has_mixing:
        res_NN = tl.load(res + token * (num_streams * num_streams) + pair, mask=is_pair, other=0.0)
        products = tl.zeros((padded, padded, block), dtype=tl.float32)
    else:
        products = tl.zeros((padded, block), dtype=tl.float32)
    outputs = tl.zeros((padded, block), dtype=tl.float32)
    firsts = tl.zeros((block,), dtype=tl.float32)
    kind = dstreams.dtype.element_ty
    scale = 1.0
    if has_scaling:
        scale = tl.load(lambda_)
    for start in range(0, width, block):
        d = start + tl.arange(0, block)
        inside = is_stream[:, None] & (d < width)[None, :]
        at = token * (num_streams * width) + s[:, None] * width + d[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        y_D = tl.load(y + token * width + d, mask=d < width, other=0.0).to(tl.float32)
        outputs += g * y_D[None, :]
        if has_scaling:
            whole = tl.sum(g, 0)
            firsts += whole * tl.load(x0 + token * width + d, mask=d < width, other=0.0).to(tl.float32)
            tl.store(dx0 + token * width + d, (tl.load(mu) * whole).to(kind), mask=d < width)
        if has_mixing:
            products += x[:, None, :] * g[None, :, :]
            dx = tl.sum(res_NN[:, :, None] * g[None, :, :], axis=1)
        else:
            products += x * g
            dx = g
        tl.store(dstreams + at, (scale * dx).to(kind), mask=inside)
        dy_D = scale * tl.sum(post_N[:, None] * g, 0)
        tl.store(dy + token * width + d, dy_D.to(kind), mask=d < width)
    dpost_N = tl.sum(outputs, 1)
    tl.store(dpost + token * num_streams + s, scale * dpost_N, mask=is_stream)
    change = tl.sum(post_N * dpost_N, 0)
    if has_mixing:
        dres_NN = tl.sum(products, 2)
        tl.store(dres + token * (num_streams * num_streams) + pair, scale * dres_NN, mask=is_pair)
        change += tl.sum(tl.sum(res_NN * dres_NN, 1), 0)
    else:
        change += tl.sum(tl.sum(products, 1), 0)
    if has_scaling:
        tl.store(dlambda + token, change)
        tl.store(dmu + token, tl.sum(firsts, 0))


def _options(streams: Tensor, res: Tensor | None, x0: Tensor | None, shape: tuple[int, int]) -> dict[str, int | bool]:
    num_streams, width = streams.shape[2:]
    return {
        "num_streams": num_streams,
        "padded": triton.next_power_of_2(num_streams),
        "block": min(shape[0], triton.next_power_of_2(width)),
        "has_mixing": res is not None,
        "has_scaling": x0 is not None,
        "num_warps": shape[1],
    }


@torch.library.custom_op("nexttransformer::stream_write", mutates_args=())
def _forward(
    streams: Tensor,
    y: Tensor,
    res: Tensor | None,
    post: Tensor,
    lambda_: Tensor | None,
    mu: Tensor | None,
    x0: Tensor | None,
) -> tuple[Tensor, Tensor]:
    new, squares = torch.empty_like(streams), torch.empty_like(post)
    _stream_forward_kernel[(post.shape[0] * post.shape[1],)](  # pyright: ignore[reportIndexIssue]
        streams,
        y,
        res if res is not None else post,
        post,
        lambda_ if lambda_ is not None else post,
        mu if mu is not None else post,
        x0 if x0 is not None else y,
        new,
        squares,
        streams.shape[3],
        **_options(streams, res, x0, _FORWARD_SHAPE),
    )
    return new, squares


@_forward.register_fake
def _(streams, y, res, post, lambda_, mu, x0):
    return torch.empty_like(streams), torch.empty_like(post)


@torch.library.custom_op("nexttransformer::stream_write_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    streams: Tensor,
    y: Tensor,
    res: Tensor | None,
    post: Tensor,
    lambda_: Tensor | None,
    mu: Tensor | None,
    x0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of streams, y, res and post, per token those of lambda and mu, and that of x0."""
    dstreams, dy, dres, dpost, dlambda, dmu, dx0 = _backward_fake(gradient, streams, y, res, post, lambda_, mu, x0)
    _stream_backward_kernel[(post.shape[0] * post.shape[1],)](  # pyright: ignore[reportIndexIssue]
        gradient.contiguous(),
        streams,
        y,
        res if res is not None else post,
        post,
        lambda_ if lambda_ is not None else post,
        mu if mu is not None else post,
        x0 if x0 is not None else y,
        dstreams,
        dy,
        dres,
        dpost,
        dlambda,
        dmu,
        dx0,
        streams.shape[3],
        **_options(streams, res, x0, _BACKWARD_SHAPE),
    )
    return dstreams, dy, dres, dpost, dlambda, dmu, dx0


def _backward_fake(gradient, streams, y, res, post, lambda_, mu, x0):
    per_token = post.new_empty(post.shape[:2] if x0 is not None else (0,))
    return (
        torch.empty_like(streams),
        torch.empty_like(y),
        torch.empty_like(res) if res is not None else post.new_empty(0),
        torch.empty_like(post),
        per_token,
        torch.empty_like(per_token),
        torch.empty_like(x0) if x0 is not None else y.new_empty(0),
    )


_backward.register_fake(_backward_fake)


def _setup(ctx, inputs, output) -> None:
    # Not every scheme uses the squared norms.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[0])


def _autograd(ctx, dnew: Tensor | None, dsquares: Tensor | None):
    *inputs, new = ctx.saved_tensors
    gradient = torch.zeros_like(new) if dnew is None else dnew
    if dsquares is not None:
        gradient = (gradient.float() + 2 * dsquares[..., None] * new.float()).to(new.dtype)
    dstreams, dy, dres, dpost, dlambda, dmu, dx0 = _backward(gradient, *inputs)
    has_mixing, has_scaling = inputs[2] is not None, inputs[6] is not None
    scales = (dlambda.sum(), dmu.sum(), dx0) if has_scaling else (None, None, None)
    return dstreams, dy, dres if has_mixing else None, dpost, *scales


_forward.register_autograd(_autograd, setup_context=_setup)


def stream_write_fused(
    streams: Tensor, y: Tensor, res: Tensor | None, post: Tensor, scaling: Scaling | None
) -> tuple[Tensor, Tensor]:
    """See `ops.stream_write.stream_write`; 16-bit streams."""
    lambda_, mu, x0 = scaling if scaling is not None else (None, None, None)
    given = (streams, y, res, post, lambda_, mu, x0)
    return _forward(*(None if x is None else x.contiguous() for x in given))
