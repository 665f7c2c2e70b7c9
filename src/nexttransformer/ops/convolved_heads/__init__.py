"""From one q/k/v product to the delta rule's inputs: causal convolution, SiLU, unit length, value-embedding mixing."""

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.convolved_heads.naive import convolved_heads_naive
from nexttransformer.ops.rotary_heads import Heads


def convolved_heads(
    qkv_BTE: Tensor,
    weight_EJ: Tensor,
    *,
    num_heads: int,
    value_row_BTD: Tensor | None = None,
    value_factor_BTH: Tensor | None = None,
    cache_BIE: Tensor | None = None,
) -> Heads:
    """Convolves every channel over time, applies SiLU, splits into heads, and gives q and k unit length.

    Args:
        qkv_BTE: q, k and v side by side, E = 3 H K, compute dtype.
        weight_EJ: J taps of each channel, float32; y_t = sum_j w_j x_(t - J + 1 + j).
        num_heads: H.
        value_row_BTD: value-embedding rows, or None.
        value_factor_BTH: their factor per head, float32, or None; v <- v + factor row.
        cache_BIE: the I = J - 1 inputs before the first token; zeros if None.

    Returns:
        q, k, v; float32 inside, each rounded once.
    """
    # Continued sequences occur in evaluation only.
    if is_fused("convolved_heads", qkv_BTE) and cache_BIE is None:
        # Imported on first use: needs Triton.
        from nexttransformer.ops.convolved_heads.fused import convolved_heads_fused

        return Heads(*convolved_heads_fused(qkv_BTE, weight_EJ, value_row_BTD, value_factor_BTH, num_heads))
    return Heads(*convolved_heads_naive(qkv_BTE, weight_EJ, value_row_BTD, value_factor_BTH, num_heads, cache_BIE))
