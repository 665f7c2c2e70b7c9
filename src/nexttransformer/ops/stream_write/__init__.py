"""Writing to several residual streams: mixing, the sublayer's output, and the skeleton's lambda and mu, in one pass."""

from torch import Tensor

from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.stream_write.naive import Scaling, stream_write_naive

__all__ = ["Scaling", "stream_write"]


def stream_write(
    streams_BTND: Tensor,
    y_BTD: Tensor,
    res_BTNN: Tensor | None,
    post_BTN: Tensor,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the new streams X'_t = lambda (sum_s res[s, t] X_s + post_t y) + mu x0 and their squared norms.

    Args:
        streams_BTND: old streams, compute dtype.
        y_BTD: the sublayer's output, compute dtype.
        res_BTNN: [..., s, t] is the weight of old stream s in new stream t, float32; None is the identity.
        post_BTN: weight of y in each new stream, float32.
        scaling: lambda, mu and x0; None is 1 and 0.

    Returns:
        The new streams [B, T, N, D] in y's dtype, float32 inside and rounded once, and the sums of squares of
        each, [B, T, N] float32, of the rounded values.
    """
    if is_fused("stream_write", streams_BTND):
        # Imported on first use: needs Triton.
        from nexttransformer.ops.stream_write.fused import stream_write_fused

        return stream_write_fused(streams_BTND, y_BTD, res_BTNN, post_BTN, scaling)
    return stream_write_naive(streams_BTND, y_BTD, res_BTNN, post_BTN, scaling)
