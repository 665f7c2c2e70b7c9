"""Reference in plain PyTorch: the truth, and the CPU path."""

from typing import NamedTuple

import torch
from torch import Tensor

from nexttransformer.ops.norm import squared_norm


class Scaling(NamedTuple):
    """Every stream becomes lambda x + mu x0; lambda and mu are 0-d float32."""

    lambda_: Tensor
    mu: Tensor
    x0_BTD: Tensor


def stream_write_naive(
    streams_BTND: Tensor, y_BTD: Tensor, res_BTNN: Tensor | None, post_BTN: Tensor, scaling: Scaling | None
) -> tuple[Tensor, Tensor]:
    """See `ops.stream_write.stream_write`."""
    old, y32_BTD = streams_BTND.float().unbind(2), y_BTD.float()
    new = []
    for t in range(len(old)):
        if res_BTNN is None:
            total = old[t]
        else:
            total = res_BTNN[..., 0, t, None] * old[0]
            for s in range(1, len(old)):
                total = total + res_BTNN[..., s, t, None] * old[s]
        total = total + post_BTN[..., t, None] * y32_BTD
        if scaling is not None:
            total = scaling.lambda_ * total + scaling.mu * scaling.x0_BTD.float()
        new.append(total.to(y_BTD.dtype))
    new_BTND = torch.stack(new, dim=2)
    return new_BTND, squared_norm(new_BTND)
