"""The squared-ReLU MLP: y = W_2 relu(W_1 x)^2, plain and fused."""

import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.ops.backends import is_fused


def relu_squared_mlp_naive(x_BTD: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> Tensor:
    """Reference in plain PyTorch; weights in x's dtype."""
    return functional.linear(functional.relu(functional.linear(x_BTD, w1_FD)).square(), w2_DF)


def relu_squared_mlp(x_BTD: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> Tensor:
    """Applies the MLP.

    Args:
        x_BTD: normalized input, compute dtype.
        w1_FD: first weight (F, D), float32 or x's dtype; cast to x's dtype.
        w2_DF: second weight (D, F), float32 or x's dtype; cast to x's dtype.

    Returns:
        y [B, T, D].
    """
    w1_FD, w2_DF = w1_FD.to(x_BTD.dtype), w2_DF.to(x_BTD.dtype)
    if is_fused("relu_squared", x_BTD):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.relu_squared.fused import relu_squared_mlp_fused

        return relu_squared_mlp_fused(x_BTD, w1_FD, w2_DF)
    return relu_squared_mlp_naive(x_BTD, w1_FD, w2_DF)
