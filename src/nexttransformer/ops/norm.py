"""RMS norm without gain, the one normalization of the skeleton, and the squared norm."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.ops.in_graph import in_graph

NORM_EPS = 2.0**-23


def has_written_out_gradient(x: Tensor) -> bool:
    """Whether gradients are written out for this input: where a float32 copy would be larger; else autograd's count."""
    return x.element_size() == 2


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x in its dtype and the float32 factor that makes it."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    """The norm with its gradient written out, so that x is kept as it is and never as a float32 copy.

    In the backward pass x joins float32 factors without `float()`: a conversion that both passes share is kept for
    the second one, at twice the size.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        output, scale = _normalized(x, eps)
        ctx.save_for_backward(x, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        (gradient,) = gradients
        inner = (gradient.float() * x).mean(-1, keepdim=True)
        return (scale * (gradient - x * (scale.square() * inner))).to(x.dtype), None


class _SquaredNorm(torch.autograd.Function):
    """The sum of squares, whose gradient is written out for the same reason."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * gradients[0][..., None] * x).to(x.dtype)


@in_graph
def _rms_norm(x: Tensor, eps: float) -> Tensor:
    return _RmsNorm.apply(x, eps)


@in_graph
def _squared_norm(x: Tensor) -> Tensor:
    return _SquaredNorm.apply(x)


def rms_norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32, in x's dtype."""
    if x.is_cuda and not torch.compiler.is_compiling() and not (x.requires_grad and torch.is_grad_enabled()):
        # Eager evaluation: one kernel instead of five, float32 inside as well.
        return functional.rms_norm(x, x.shape[-1:], eps=eps)
    return _rms_norm(x, eps) if has_written_out_gradient(x) else _normalized(x, eps)[0]


def squared_norm(x: Tensor) -> Tensor:
    """Returns sum(x^2) over the last dimension, float32."""
    return _squared_norm(x) if has_written_out_gradient(x) else x.float().square().sum(-1)
