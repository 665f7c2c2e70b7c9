"""Reference in plain PyTorch: the truth, and the CPU path."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from nexttransformer.ops.norm import rms_norm


def gated_norm_naive(
    o_BTHV: Tensor, z_BTHV: Tensor, gain_V: Tensor, bias_HV: Tensor | None, activation: str, eps: float
) -> Tensor:
    """See `ops.gated_norm.gated_norm`."""
    z = z_BTHV.float() if bias_HV is None else z_BTHV.float() + bias_HV
    gate = silu(z) if activation == "silu" else torch.sigmoid(z)
    return (rms_norm(o_BTHV.float(), eps) * gain_V * gate).to(o_BTHV.dtype)
