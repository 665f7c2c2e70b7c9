"""Plain residual stream: x + y.

Equations: X = x; read(X) = x; write(X, y) = x + y; scale(X) = lambda x + mu x0.
Source: karpathy/nanochat nanochat/gpt.py. Parameters: none. FLOPs: the baseline.
"""

from typing import Any

from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.parts import Options, Residual, ResidualRead


class Plain(Residual):
    """One stream [B, T, D] in the compute dtype."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__(config)

    def init(self, x0_BTD: Tensor) -> Tensor:
        return x0_BTD

    def scale(self, state: Tensor, lambda_: Tensor, mu: Tensor, x0_BTD: Tensor) -> Tensor:
        return (lambda_ * state.float() + mu * x0_BTD.float()).to(state.dtype)

    def read(self, state: Tensor, sublayer: int) -> ResidualRead:
        return ResidualRead(state, state, state)

    def write(self, state: Tensor, sublayer: int, y_BTD: Tensor, context: Any) -> Tensor:
        return state + y_BTD

    def collapse(self, state: Tensor) -> Tensor:
        return state
