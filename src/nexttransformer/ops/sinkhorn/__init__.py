"""Sinkhorn normalization of small matrices: many rounds of rows and columns in one pass."""

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.sinkhorn.naive import sinkhorn_naive

__all__ = ["sinkhorn"]


def sinkhorn(logits_BTNN: Tensor, *, num_rounds: int, eps: float) -> Tensor:
    """Returns nearly doubly stochastic matrices from logits; columns (dim -2) sum to 1 exactly.

    Softmax of the rows plus eps, then columns, then `num_rounds` - 1 times rows and columns, each divided by its sum.

    Args:
        logits_BTNN: [..., s, t], float32.
        num_rounds: how often columns are normalized, 1 or more.
        eps: added to the softmax.
    """
    if is_fused("sinkhorn", logits_BTNN, item_bytes=4):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.sinkhorn.fused import sinkhorn_fused

        return sinkhorn_fused(logits_BTNN, num_rounds, eps)
    return sinkhorn_naive(logits_BTNN, num_rounds, eps)
