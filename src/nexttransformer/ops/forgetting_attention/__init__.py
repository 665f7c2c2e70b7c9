"""Causal softmax attention whose scores decay by a forget gate per head."""

from torch import Tensor

from nexttransformer.ops.forgetting_attention.naive import forgetting_attention_naive


def forgetting_attention(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, log_f_BSH: Tensor, *, window: int | None = None
) -> Tensor:
    """Attends causally with scores q_t.k_s / sqrt(K) + sum of log f over s+1 .. t; the T queries are the last T of S.

    Args:
        q_BTHK: queries.
        k_BSHK: keys, S >= T.
        v_BSHV: values.
        log_f_BSH: log forget gates, float32, natural logarithm, <= 0.
        window: visible keys to the left of the query's own; None is unlimited.

    Returns:
        Outputs [B, T, H, V], in the values' dtype.
    """
    if q_BTHK.is_cuda and q_BTHK.dtype.itemsize == 2 and q_BTHK.shape[1] == k_BSHK.shape[1]:
        # Imported on first use: registers custom operations for CUDA.
        from nexttransformer.ops.forgetting_attention.fused import forgetting_attention_fused

        return forgetting_attention_fused(q_BTHK, k_BSHK, v_BSHV, log_f_BSH, window=window)
    return forgetting_attention_naive(q_BTHK, k_BSHK, v_BSHV, log_f_BSH, window=window)
