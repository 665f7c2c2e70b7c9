"""Reference in plain PyTorch: the truth, and the CPU path."""

import torch
from torch import Tensor


def sinkhorn_naive(logits_NN: Tensor, num_rounds: int, eps: float) -> Tensor:
    """See `ops.sinkhorn.sinkhorn`; [..., N, N]."""
    m = torch.softmax(logits_NN, dim=-1) + eps
    m = m / m.sum(-2, keepdim=True)
    for _ in range(num_rounds - 1):
        m = m / m.sum(-1, keepdim=True)
        m = m / m.sum(-2, keepdim=True)
    return m
