"""What all schemes with several residual streams share: the state, reading, writing and float32 generators.

Shape letters: N streams, M coefficients of one generator, I inputs and O outputs of a product.

Memory traffic is the whole cost of these schemes. A write waits until its result is read: lambda and mu of the next
layer then join it in one pass (`ops/stream_write`), which also gives the squared norms that generators need.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from pydantic import Field
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Linear
from nexttransformer.models.parts import Options, Residual, ResidualRead, zeros
from nexttransformer.ops.in_graph import in_graph
from nexttransformer.ops.norm import squared_norm
from nexttransformer.ops.stream_write import Scaling, stream_write


class StreamOptions(Options):
    """`num_streams`: N."""

    num_streams: int = Field(default=4, ge=2, le=4)


class Coefficients(NamedTuple):
    """Per-token weights of one sublayer, float32.

    Attributes:
        pre_BTN: weight of each stream in the sublayer's input.
        res_BTNN: [..., s, t] is the weight of old stream s in new stream t; None is the identity.
        post_BTN: weight of the sublayer's output in each new stream.
        memo: what the scheme hands to its next sublayer.
    """

    pre_BTN: Tensor
    res_BTNN: Tensor | None
    post_BTN: Tensor
    memo: tuple[Tensor, ...]


class StreamState(NamedTuple):
    """N streams.

    Attributes:
        streams_BTND: compute dtype.
        squares_BTN: their sums of squares over D, float32.
        memo: the scheme's own tensors.
    """

    streams_BTND: Tensor
    squares_BTN: Tensor
    memo: tuple[Tensor, ...]


class Unwritten(NamedTuple):
    """Streams to which a sublayer's output is yet to be written."""

    streams_BTND: Tensor
    y_BTD: Tensor
    weights: Coefficients


class ReadContext(NamedTuple):
    """What a write needs of the read before it."""

    streams_BTND: Tensor
    weights: Coefficients


class _SplitProduct(torch.autograd.Function):
    """x W^T of bfloat16 x and float32 W on CUDA, accumulated and returned in float32.

    W is split into two bfloat16 terms whose sum keeps 16 bits, so no float32 copy of x is made and the
    product runs on tensor cores. Gradients are rounded as in any bfloat16 layer.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor) -> Tensor:
        high = weight_OI.to(x_RI.dtype)
        low = (weight_OI - high.float()).to(x_RI.dtype)
        y = torch.mm(x_RI, torch.cat([high, low]).t(), out_dtype=torch.float32)
        ctx.save_for_backward(x_RI, high)
        return y[:, : weight_OI.shape[0]] + y[:, weight_OI.shape[0] :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x_RI, high_OI = ctx.saved_tensors
        rounded_RO = gradients[0].to(x_RI.dtype)
        return rounded_RO @ high_OI, torch.mm(rounded_RO.t(), x_RI, out_dtype=torch.float32)


@in_graph
def _split_product(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    return _SplitProduct.apply(x_RI, weight_OI)


def project_float32(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T in float32 accuracy, [..., O], for x [..., I] of any dtype and a float32 weight."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _split_product(x.flatten(0, -2), weight_OI).unflatten(0, x.shape[:-1])
    return functional.linear(x.float(), weight_OI)


class StreamGenerator(Linear):
    """Generates logits n(vec X) Phi^T of one sublayer from all streams; Phi (M, N*D), stream-major columns.

    The row norm is a factor per token, so it is applied to the M logits instead of the N*D inputs:
    the same number up to float32 rounding, without a normalized float32 copy of the streams.
    """

    def __init__(self, num_streams: int, width: int, num_logits: int) -> None:
        super().__init__(num_streams * width, num_logits, tag="coefficient", init=zeros())

    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("StreamGenerator is applied by generate_logits")


def generate_logits(x: Tensor, squares: Tensor, weight_MX: Tensor, eps: float) -> Tensor:
    """Returns n(x) W^T, float32 [..., M].

    Args:
        x: vectors [..., X].
        squares: their sums of squares, float32 [...].
        weight_MX: float32.
        eps: added to the mean square.
    """
    return project_float32(x, weight_MX) * torch.rsqrt(squares / x.shape[-1] + eps)[..., None]


def sum_tensors(terms: list[Tensor]) -> Tensor:
    """Returns the sum of one or more tensors, in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def read_streams(streams_BTND: Tensor, pre_BTN: Tensor) -> Tensor:
    """Returns sum_s pre_s X_s, [B, T, D], summed in float32 and rounded once to the streams' dtype."""
    # A sum over a dimension, not of slices: the gradient of slices is a `stack`, where compiled code evaluates every
    # stream for each element. Without `float()`, whose result would be kept for the backward pass.
    return (pre_BTN[..., None] * streams_BTND).sum(2).to(streams_BTND.dtype)


class MultiStream(Residual):
    """N streams, copies of x0 at the start, averaged at the end; a subclass generates the coefficients.

    lambda and mu act on every stream.
    """

    Options = StreamOptions
    fused_ops = ("stream_write",)
    has_stream_mixing = True

    def __init__(self, config: ModelConfig, options: StreamOptions) -> None:
        super().__init__(config)
        self.num_streams = options.num_streams
        self.width = config.width

    def first_memo(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns what the scheme hands to sublayer 0."""
        return ()

    def coefficients(self, state: StreamState, sublayer: int) -> Coefficients:
        """Returns the weights of a sublayer."""
        raise TypeError(f"{type(self).__name__} must define coefficients")

    def init(self, x0_BTD: Tensor) -> StreamState:
        streams_BTND = x0_BTD[:, :, None].expand(-1, -1, self.num_streams, -1)
        return StreamState(streams_BTND, squared_norm(streams_BTND), self.first_memo(x0_BTD.device))

    def scale(self, state: StreamState | Unwritten, lambda_: Tensor, mu: Tensor, x0_BTD: Tensor) -> StreamState:
        if isinstance(state, Unwritten):
            return _written(state, Scaling(lambda_, mu, x0_BTD))
        scaled_BTND = lambda_ * state.streams_BTND.float() + mu * x0_BTD.float()[:, :, None]
        streams_BTND = scaled_BTND.to(state.streams_BTND.dtype)
        return StreamState(streams_BTND, squared_norm(streams_BTND), state.memo)

    def read(self, state: StreamState | Unwritten, sublayer: int) -> ResidualRead:
        state = _written(state)
        weights = self.coefficients(state, sublayer)
        u_BTD = read_streams(state.streams_BTND, weights.pre_BTN)
        return ResidualRead(u_BTD, u_BTD, u_BTD, ReadContext(state.streams_BTND, weights))

    def write(self, state: StreamState | Unwritten, sublayer: int, y_BTD: Tensor, context: ReadContext) -> Unwritten:
        return Unwritten(context.streams_BTND, y_BTD, context.weights)

    def collapse(self, state: StreamState | Unwritten) -> Tensor:
        streams_BTND = _written(state).streams_BTND
        total_BTD = sum_tensors([x.float() for x in streams_BTND.unbind(2)])
        return (total_BTD / self.num_streams).to(streams_BTND.dtype)

    def extra_macs(self) -> float:
        """(N^2 + 2N) D per sublayer: reading, mixing and writing; 2N D without mixing."""
        per_channel = 2 * self.num_streams + (self.num_streams**2 if self.has_stream_mixing else 0)
        return self.num_sublayers * per_channel * self.width


def _written(state: StreamState | Unwritten, scaling: Scaling | None = None) -> StreamState:
    """Returns the state with a waiting output written, and scaled where scaling is given."""
    if isinstance(state, StreamState):
        return state
    weights = state.weights
    new = stream_write(state.streams_BTND, state.y_BTD, weights.res_BTNN, weights.post_BTN, scaling)
    return StreamState(*new, weights.memo)
