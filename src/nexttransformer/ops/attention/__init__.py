"""Causal softmax attention with an optional left window: one function, several backends."""

from torch import Tensor

from nexttransformer.ops.attention.naive import attention_naive


def attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *, window: int | None = None) -> Tensor:
    """Attends causally; the T queries are the last T of S positions.

    Args:
        q_BTHK: queries.
        k_BSHK: keys, S >= T.
        v_BSHV: values.
        window: visible keys to the left of the query's own; None is unlimited.

    Returns:
        Outputs [B, T, H, V], in the inputs' dtype. Scale is K^-1/2.
    """
    if q_BTHK.is_cuda:
        # Imported on first use: needs CUDA.
        from nexttransformer.ops.attention.fused import attention_fused

        return attention_fused(q_BTHK, k_BSHK, v_BSHV, window=window)
    return attention_naive(q_BTHK, k_BSHK, v_BSHV, window=window)
