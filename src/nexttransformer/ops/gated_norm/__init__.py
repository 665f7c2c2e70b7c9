"""The output of a recurrent mixer: RMS norm of every head times a gain, times an activated gate."""

from typing import Literal

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.gated_norm.naive import gated_norm_naive

__all__ = ["Activation", "gated_norm"]

Activation = Literal["silu", "sigmoid"]


def gated_norm(
    o_BTHV: Tensor,
    z_BTHV: Tensor,
    gain_V: Tensor,
    bias_HV: Tensor | None = None,
    *,
    activation: Activation,
    eps: float,
) -> Tensor:
    """Returns o / sqrt(mean(o^2) + eps) * gain * activation(z + bias), float32 inside, rounded once to o's dtype.

    Args:
        o_BTHV: output per head, compute dtype; the mean is over V.
        z_BTHV: gate before its activation, o's dtype.
        gain_V: gain shared by all heads, float32.
        bias_HV: added to z, float32; None for none.
        activation: "silu" or "sigmoid".
        eps: added to the mean square.
    """
    if is_fused("gated_norm", o_BTHV):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.gated_norm.fused import gated_norm_fused

        return gated_norm_fused(o_BTHV, z_BTHV, gain_V, bias_HV, activation, eps)
    return gated_norm_naive(o_BTHV, z_BTHV, gain_V, bias_HV, activation, eps)
