"""RMS norm without gain: the one normalization of the skeleton."""

import torch
from torch import Tensor

NORM_EPS = 2.0**-23


def rms_norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32, in x's dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
