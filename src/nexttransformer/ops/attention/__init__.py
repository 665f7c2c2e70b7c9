"""Causal softmax attention with an optional left window: one function, several backends."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nexttransformer.ops.attention.naive import attention_naive
from nexttransformer.ops.backends import chosen_path


@dataclass(frozen=True)
class AttentionPlan:
    """The backend chosen for whole rows of one context on one device.

    Attributes:
        backend: "cudnn", "flash", "flex" or "naive".
        num_tokens: the context it was made for.
        block_mask: flex_attention's mask of a window, else None.
    """

    backend: str
    num_tokens: int
    block_mask: Any = None


def plan_attention(num_tokens: int, window: int | None, device: torch.device) -> AttentionPlan:
    """Chooses the fastest correct backend for causal rows of `num_tokens` on `device`."""
    if device.type != "cuda" or chosen_path("attention" if window is None else "attention_window") == "reference":
        return AttentionPlan("naive", num_tokens)
    # Imported on first use: needs CUDA.
    from nexttransformer.ops.attention.fused import plan_fused

    return plan_fused(num_tokens, window, device)


def attention(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, *, window: int | None = None, plan: AttentionPlan | None = None
) -> Tensor:
    """Attends causally; the T queries are the last T of S positions.

    Args:
        q_BTHK: queries.
        k_BSHK: keys, S >= T.
        v_BSHV: values.
        window: visible keys to the left of the query's own; None is unlimited.
        plan: the backend for rows of the planned context; other shapes choose their own.

    Returns:
        Outputs [B, T, H, V], in the inputs' dtype. Scale is K^-1/2.
    """
    is_rejected = plan is not None and plan.backend == "naive"
    if q_BTHK.is_cuda and q_BTHK.element_size() == 2 and not is_rejected:
        from nexttransformer.ops.attention.fused import attention_fused

        return attention_fused(q_BTHK, k_BSHK, v_BSHV, window=window, plan=plan)
    return attention_naive(q_BTHK, k_BSHK, v_BSHV, window=window)
