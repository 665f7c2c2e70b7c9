"""RMS norm without gain, the one normalization of the skeleton, and the squared norm."""

import torch
import torch.nn.functional as functional
from torch import Tensor

NORM_EPS = 2.0**-23


def rms_norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32, in x's dtype."""
    if x.is_cuda and not torch.compiler.is_compiling() and not (x.requires_grad and torch.is_grad_enabled()):
        # Eager evaluation: one kernel instead of five, float32 inside as well.
        return functional.rms_norm(x, x.shape[-1:], eps=eps)
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def squared_norm(x: Tensor) -> Tensor:
    """Returns sum(x^2) over the last dimension, float32."""
    return x.float().square().sum(-1)
