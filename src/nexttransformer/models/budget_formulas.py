"""Formulas of sequence-mixing cost: multiply-adds per token beyond the weights. One convention for all mixers."""

# Chunk length of every recurrent mixer's cost, whatever tile a kernel uses.
CHUNK_TOKENS = 64


def mean_visible_keys(num_tokens: int, window: int | None) -> float:
    """Mean number of keys a query sees, its own included; `window` counts keys to the left, None is unlimited."""
    visible = num_tokens if window is None else min(window + 1, num_tokens)
    return (visible * (visible + 1) / 2 + (num_tokens - visible) * visible) / num_tokens


def softmax_attention_macs(num_heads: int, key_dim: int, value_dim: int, num_tokens: int, window: int | None) -> float:
    """H (d_qk + d_v) k(W), causal-exact."""
    return num_heads * (key_dim + value_dim) * mean_visible_keys(num_tokens, window)


def decayed_linear_macs(num_heads: int, key_dim: int, value_dim: int) -> float:
    """Hs [2 K V + (C/2)(K + V)]: GLA, HGRN2, Mamba-2/3, Lightning."""
    return num_heads * (2 * key_dim * value_dim + CHUNK_TOKENS / 2 * (key_dim + value_dim))


def delta_rule_macs(num_heads: int, key_dim: int, value_dim: int) -> float:
    """Hs [3 K V + (C/2)(3 K + 2 V)]: DeltaNet, GDN, KDA, GDN-2, Comba."""
    return num_heads * (3 * key_dim * value_dim + CHUNK_TOKENS / 2 * (3 * key_dim + 2 * value_dim))
