"""Reference soft-capped cross-entropy in plain PyTorch: the truth, and the CPU path."""

import torch
import torch.nn.functional as functional
from torch import Tensor


def softcap_cross_entropy_naive(h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, soft_cap: float) -> Tensor:
    """See `ops.cross_entropy.softcap_cross_entropy`."""
    logits_NV = functional.linear(h_ND, weight_VD.to(h_ND.dtype)).float()
    logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
    return functional.cross_entropy(logits_NV, targets_N, reduction="none")
