"""Reference in plain PyTorch: the truth, and the CPU path."""

import torch
from torch import Tensor

from nexttransformer.ops.norm import rms_norm


def rotate(x_BTHK: Tensor, cos_TJ: Tensor, sin_TJ: Tensor) -> Tensor:
    """Turns the pairs (j, j + K/2) by minus the angle; float32 result."""
    half = x_BTHK.shape[-1] // 2
    x32 = x_BTHK.float()
    first, second = x32[..., :half], x32[..., half:]
    cos, sin = cos_TJ.float()[None, :, None, :], sin_TJ.float()[None, :, None, :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def rotary_norm(x_BTHK: Tensor, cos_TJ: Tensor, sin_TJ: Tensor, gain: float) -> Tensor:
    """Returns gain * n(rotate(x)), normalized over K, rounded once to x's dtype."""
    return (gain * rms_norm(rotate(x_BTHK, cos_TJ, sin_TJ))).to(x_BTHK.dtype)


def mix_value_row(v_BTHK: Tensor, row_BTD: Tensor | None, factor_BTH: Tensor | None) -> Tensor:
    """Returns v + factor * row per head, or v where there is no row."""
    if row_BTD is None or factor_BTH is None:
        return v_BTHK
    return (v_BTHK.float() + factor_BTH[..., None] * row_BTD.view_as(v_BTHK).float()).to(v_BTHK.dtype)


def rotary_heads_naive(
    qkv_BTE: Tensor,
    cos_TJ: Tensor,
    sin_TJ: Tensor,
    value_row_BTD: Tensor | None,
    value_factor_BTH: Tensor | None,
    num_heads: int,
    qk_gain: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.rotary_heads.rotary_heads`."""
    q, k, v = qkv_BTE.view(*qkv_BTE.shape[:2], 3, num_heads, -1).unbind(2)
    q, k = rotary_norm(q, cos_TJ, sin_TJ, qk_gain), rotary_norm(k, cos_TJ, sin_TJ, qk_gain)
    return q, k, mix_value_row(v, value_row_BTD, value_factor_BTH)
