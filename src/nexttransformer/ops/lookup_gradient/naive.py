"""Reference in plain PyTorch: the truth, and the CPU path."""

import torch
import torch.nn.functional as functional
from torch import Tensor


def lookup_naive(ids: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.lookup_gradient.lookup`; the gradient is autograd's."""
    return functional.embedding(ids, weight_VD).to(dtype)
