"""From one q/k/v product to attention's inputs: rotary positions, QK norm and value-embedding mixing."""

from typing import NamedTuple

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.rotary_heads.naive import rotary_heads_naive


class Heads(NamedTuple):
    """Inputs of attention or of the delta rule, [B, T, H, K] each; contiguous if made by a fused form."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    v_BTHK: Tensor


def rotary_heads(
    qkv_BTE: Tensor,
    cos_TJ: Tensor,
    sin_TJ: Tensor,
    *,
    num_heads: int,
    qk_gain: float,
    value_row_BTD: Tensor | None = None,
    value_factor_BTH: Tensor | None = None,
) -> Heads:
    """Splits a product into heads, rotates and normalizes q and k, and adds factor * row to v.

    Args:
        qkv_BTE: q, k and v side by side, E = 3 H K, compute dtype.
        cos_TJ: cosine of the positions' angles, J = K / 2.
        sin_TJ: sine.
        num_heads: H.
        qk_gain: factor on the normalized q and k.
        value_row_BTD: value-embedding rows, or None.
        value_factor_BTH: their factor per head, float32, or None.

    Returns:
        q, k, v; float32 inside, each rounded once.
    """
    if is_fused("rotary_heads", qkv_BTE):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.rotary_heads.fused import rotary_heads_fused

        q, k, v = rotary_heads_fused(
            qkv_BTE, cos_TJ, sin_TJ, value_row_BTD, value_factor_BTH, num_heads, float(qk_gain)
        )
    else:
        q, k, v = rotary_heads_naive(qkv_BTE, cos_TJ, sin_TJ, value_row_BTD, value_factor_BTH, num_heads, qk_gain)
    return Heads(q, k, v)
