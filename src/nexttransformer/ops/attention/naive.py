"""Reference attention in plain PyTorch: the truth, and the CPU path."""

import torch
import torch.nn.functional as functional
from torch import Tensor


def visible_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device | str) -> Tensor:
    """Returns [T, S] booleans: query t (position S - T + t) sees keys 0 <= distance <= window."""
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = positions[:, None] - torch.arange(num_keys, device=device)[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance <= window)


def attention_naive(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *, window: int | None) -> Tensor:
    """See `ops.attention.attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSHK, v_BSHV))
    num_queries, num_keys = q.shape[2], k.shape[2]
    is_full = window is None or window >= num_keys - 1
    if is_full and num_queries == num_keys:
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif is_full and num_queries == 1:
        o = functional.scaled_dot_product_attention(q, k, v)
    else:
        mask = visible_mask(num_queries, num_keys, window, q.device)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o.transpose(1, 2)
