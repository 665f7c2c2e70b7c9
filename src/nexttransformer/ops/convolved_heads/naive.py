"""Reference in plain PyTorch: the truth, and the CPU path."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.ops.rotary_heads.naive import mix_value_row

UNIT_EPS = 1e-6


def causal_convolution(x_BTE: Tensor, weight_EJ: Tensor, cache_BIE: Tensor | None) -> Tensor:
    """Returns the depthwise causal convolution in float32; before x come the I = J - 1 cached inputs, or zeros."""
    num_tokens, taps = x_BTE.shape[1], weight_EJ.shape[1]
    if cache_BIE is None:
        padded = functional.pad(x_BTE, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat([cache_BIE, x_BTE], dim=1)
    y_BTE = padded[:, :num_tokens].float() * weight_EJ[:, 0]
    for j in range(1, taps):
        y_BTE = y_BTE + padded[:, j : j + num_tokens].float() * weight_EJ[:, j]
    return y_BTE


def unit_length(x_BTHK: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6) over the last dimension, for float32 (or wider) x."""
    return x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + UNIT_EPS)


def convolved_heads_naive(
    qkv_BTE: Tensor,
    weight_EJ: Tensor,
    value_row_BTD: Tensor | None,
    value_factor_BTH: Tensor | None,
    num_heads: int,
    cache_BIE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.convolved_heads.convolved_heads`."""
    h_BTE = functional.silu(causal_convolution(qkv_BTE, weight_EJ, cache_BIE))
    q, k, v = h_BTE.view(*h_BTE.shape[:2], 3, num_heads, -1).unbind(2)
    dtype = qkv_BTE.dtype
    v = mix_value_row(v, value_row_BTD, value_factor_BTH)
    return unit_length(q).to(dtype), unit_length(k).to(dtype), v.to(dtype)
