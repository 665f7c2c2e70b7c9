"""The gradient of a lookup in plain PyTorch, where Triton is absent: in the place of `ops.lookup_gradient.fused`."""

import sys
from types import ModuleType

from torch import Tensor

from nexttransformer.ops.lookup_gradient import LookupOrder


def lookup_gradient_stub(gradient: Tensor, order: LookupOrder) -> Tensor:
    """Returns [num_rows, D], float32, the sums of the gradient's rows in the given order."""
    rows_ND = gradient.flatten(0, -2).float()[order.tokens_N]
    return rows_ND.new_zeros(order.starts.shape[0] - 1, rows_ND.shape[1]).index_add(0, order.ids_N, rows_ND)


def install_lookup_gradient() -> ModuleType:
    """Makes the stand-in what the backward pass imports, in this process; returns the module."""
    module = ModuleType("nexttransformer.ops.lookup_gradient.fused")
    module.lookup_gradient_fused = lookup_gradient_stub  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module
    return module
