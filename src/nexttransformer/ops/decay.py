"""Log decay of the gated delta rules and its initial distributions.

alpha = exp(-exp(A_log) softplus(z + dt_bias)): A is a rate per head, softplus(..) a step length. Float32 throughout.
Source: fla/layers/gated_deltanet.py and fla/layers/kda.py of fla-core 0.6.0, from Mamba-2 (arXiv 2405.21060).
"""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

# The smallest positive value that a float32 uniform draw on [0, 16) can give.
_SMALLEST_RATE = 16 * 2.0**-24
_STEP_RANGE = (1e-3, 1e-1)
_STEP_FLOOR = 1e-4


def log_decay(z: Tensor, rate_log: Tensor, step_bias: Tensor) -> Tensor:
    """Returns log alpha = -exp(A_log) softplus(z + dt_bias), float32, <= 0; softplus is linear above 20.

    Args:
        z: raw gate, any dtype.
        rate_log: A_log, float32, broadcastable to z.
        step_bias: dt_bias, float32, broadcastable to z.
    """
    return -rate_log.exp() * functional.softplus(z.float() + step_bias)


def draw_rate_log(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws A_log = log A, A uniform on [low, high), an exact 0 raised to the smallest positive draw."""
    rate = torch.empty(shape).uniform_(low, high, generator=generator)
    return rate.clamp_min(_SMALLEST_RATE).log()


def draw_step_bias(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws dt_bias = softplus^-1(dt), dt log-uniform on [1e-3, 1e-1), at least 1e-4."""
    low, high = (math.log(bound) for bound in _STEP_RANGE)
    step = torch.empty(shape).uniform_(low, high, generator=generator).exp().clamp_min(_STEP_FLOOR)
    return step + (-torch.expm1(-step)).log()
