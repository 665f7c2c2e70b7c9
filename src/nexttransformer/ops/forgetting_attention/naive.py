"""Reference forgetting attention in plain PyTorch: the truth, the CPU path, and continued sequences on CUDA."""

import torch
from torch import Tensor

from nexttransformer.ops.attention.naive import visible_mask


def forgetting_attention_naive(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, log_f_BSH: Tensor, *, window: int | None
) -> Tensor:
    """See `ops.forgetting_attention.forgetting_attention`; scores in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHV))
    num_queries, num_keys = q.shape[2], k.shape[2]
    total_BHS = log_f_BSH.to(dtype).cumsum(1).transpose(1, 2)
    decay_BHTS = total_BHS[:, :, num_keys - num_queries :, None] - total_BHS[:, :, None, :]
    scores_BHTS = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + decay_BHTS
    hidden_TS = ~visible_mask(num_queries, num_keys, window, q.device)
    weights_BHTS = torch.softmax(scores_BHTS.masked_fill(hidden_TS, float("-inf")), dim=-1)
    return (weights_BHTS @ v).transpose(1, 2).to(v_BSHV.dtype)
