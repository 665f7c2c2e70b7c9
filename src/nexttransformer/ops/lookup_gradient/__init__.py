"""Lookup in a table: the forward pass is the compiler's, the table's gradient one deterministic kernel.

Generated code writes zeros and adds every token's row to them atomically, in an order that changes from run to run.
"""

from typing import Any

import torch
from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.in_graph import in_graph
from nexttransformer.ops.lookup_gradient.naive import lookup_naive
from nexttransformer.ops.lookup_gradient.order import LookupOrder, order_tokens

__all__ = ["LookupOrder", "lookup", "lookup_order"]


class _Lookup(torch.autograd.Function):
    """A lookup that keeps the order of the tokens, and nothing of the table's size, for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight_VD: Tensor, dtype: torch.dtype, tokens_N: Tensor, ids_N: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tokens_N, ids_N, starts)
        return lookup_naive(ids, weight_VD, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Imported on first use: needs Triton.
        from nexttransformer.ops.lookup_gradient.fused import lookup_gradient_fused

        gradient_VD = lookup_gradient_fused(gradients[0], LookupOrder(*ctx.saved_tensors))
        return None, gradient_VD, None, None, None, None


@in_graph
def _lookup(
    ids: Tensor, weight_VD: Tensor, dtype: torch.dtype, tokens_N: Tensor, ids_N: Tensor, starts: Tensor
) -> Tensor:
    return _Lookup.apply(ids, weight_VD, dtype, tokens_N, ids_N, starts)


def lookup_order(ids: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> LookupOrder | None:
    """Returns what `lookup` wants for these ids in every table of this size, or None where it wants nothing.

    It sorts only where gradients of the table are recorded and the kernel runs.

    Args:
        ids: int64 or int32, any shape.
        weight_VD: one of the tables, float32.
        dtype: dtype of the rows to look up.
    """
    has_gradient = torch.is_grad_enabled() and weight_VD.requires_grad
    if has_gradient and dtype.itemsize == 2 and is_fused("lookup_gradient", weight_VD, item_bytes=4):
        return order_tokens(ids, weight_VD.shape[0])
    return None


def lookup(ids: Tensor, weight_VD: Tensor, dtype: torch.dtype, order: LookupOrder | None = None) -> Tensor:
    """Returns the table's rows of these ids in `dtype`, [..., D].

    Args:
        ids: int64 or int32, any shape.
        weight_VD: table, float32.
        dtype: rows are cast to it right after the lookup.
        order: of the same ids and for V rows, from `lookup_order`. With it the table's gradient [V, D] is the
            float32 sum over each id's tokens, in an order that these alone decide: the same bits every time. Without
            it autograd's.
    """
    if order is None:
        return lookup_naive(ids, weight_VD, dtype)
    return _lookup(ids, weight_VD, dtype, *order)
