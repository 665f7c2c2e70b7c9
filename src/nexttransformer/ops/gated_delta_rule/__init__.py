"""Gated delta rule: linear attention whose state decays by a scalar per head and is corrected by a delta write."""

from torch import Tensor

from nexttransformer.ops.gated_delta_rule.naive import gated_delta_rule_chunk


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Evaluates S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K) along the sequence.

    Args:
        q_BTHK: queries of unit length; the scale K^-1/2 is applied inside.
        k_BTHK: keys of unit length.
        v_BTHV: values.
        g_BTH: log decay, float32, natural logarithm, <= 0.
        beta_BTH: write strength, float32.
        initial_state_BHKV: state before the first token, float32; None is zero.
        want_state: whether to return the state after the last token.

    Returns:
        Outputs [B, T, H, V] in v's dtype, and the state [B, H, K, V] in float32 or None.
    """
    if q_BTHK.is_cuda and q_BTHK.dtype.itemsize == 2:
        # Imported on first use: registers custom operations for CUDA.
        from nexttransformer.ops.gated_delta_rule.fused import gated_delta_rule_fused

        return gated_delta_rule_fused(
            q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, initial_state_BHKV=initial_state_BHKV, want_state=want_state
        )
    o_BTHV, state_BHKV = gated_delta_rule_chunk(
        q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, initial_state_BHKV=initial_state_BHKV
    )
    return o_BTHV, state_BHKV if want_state else None
