"""Fused CUDA form: one pass over the streams each way.

Compiled from plain PyTorch the new streams are computed again in every kernel that reads them. The gradient of the
squared norms is added outside, where it joins what other readers of the streams contribute.
"""

import torch
import triton
from torch import Tensor

from nexttransformer.ops.stream_write.kernels import (
    ROWS,
    stream_backward_kernel,
    stream_forward_kernel,
    stream_mixing_backward_kernel,
)
from nexttransformer.ops.stream_write.naive import Scaling

# Channels of a step and warps, the best measured on an H200. Forward a thread holds its channels of every stream, so
# that sums over streams stay in it. Backward, without mixing, streams lie across threads, and several warps would meet
# in shared memory at every step; with mixing tensor cores form the sums (0.40 instead of 0.76 ms).
_FORWARD_SHAPE, _BACKWARD_SHAPE, _MIXING_BACKWARD_SHAPE = (512, 2), (128, 1), (128, 2)


def _options(streams: Tensor, x0: Tensor | None, shape: tuple[int, int]) -> dict[str, int | bool]:
    num_streams, width = streams.shape[2:]
    assert 2 <= num_streams <= ROWS, f"{num_streams} streams: from 2 to {ROWS} fit the kernels' matrices"
    return {
        "num_streams": num_streams,
        "padded": triton.next_power_of_2(num_streams),
        "block": min(shape[0], triton.next_power_of_2(width)),
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
    stream_forward_kernel[(post.shape[0] * post.shape[1],)](  # pyright: ignore[reportIndexIssue]
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
        has_mixing=res is not None,
        **_options(streams, x0, _FORWARD_SHAPE),
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
    num_tokens, width = post.shape[0] * post.shape[1], streams.shape[3]
    lambda_, mu, x0_or_y = (lambda_, mu, x0) if x0 is not None else (post, post, y)
    if res is None:
        stream_backward_kernel[(num_tokens,)](  # pyright: ignore[reportIndexIssue]
            *(gradient.contiguous(), streams, y, post, lambda_, mu, x0_or_y),
            *(dstreams, dy, dpost, dlambda, dmu, dx0),
            width,
            **_options(streams, x0, _BACKWARD_SHAPE),
        )
    else:
        options = _options(streams, x0, _MIXING_BACKWARD_SHAPE)
        stream_mixing_backward_kernel[(triton.cdiv(num_tokens, ROWS // options["padded"]),)](  # pyright: ignore[reportIndexIssue]
            *(gradient.contiguous(), streams, y, res, post, lambda_, mu, x0_or_y),
            *(dstreams, dy, dres, dpost, dlambda, dmu, dx0),
            num_tokens,
            width,
            **options,
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
