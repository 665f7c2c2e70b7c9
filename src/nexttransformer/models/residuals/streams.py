"""What all schemes with several residual streams share: the state, reading, writing and float32 generators.

Shape letters: N streams, M coefficients of one generator, I inputs and O outputs of a product.

Memory traffic is the whole cost of these schemes, so the state is N separate [B, T, D] tensors in the
compute dtype: the sums over streams, the sum of squares and their gradients are then element-wise chains
and plain row reductions over the same index range, which torch.compile merges into one pass per read and
per write. One [B, T, N, D] tensor would be copied by concatenation or read N times.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from pydantic import Field
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Linear
from nexttransformer.models.parts import Options, Residual, ResidualRead, zeros

Streams = tuple[Tensor, ...]


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
    """N streams, [B, T, D] each in the compute dtype, and the scheme's own tensors."""

    streams: Streams
    memo: tuple[Tensor, ...]


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


def project_float32(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T in float32 accuracy, [..., O], for x [..., I] of any dtype and a float32 weight."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _SplitProduct.apply(x.flatten(0, -2), weight_OI).unflatten(0, x.shape[:-1])
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


def generate_logits(streams: Streams, weight_MX: Tensor, eps: float) -> Tensor:
    """Returns n(vec X) W^T with one norm over all streams, float32 [B, T, M]; weight (M, N*D)."""
    width = streams[0].shape[-1]
    weights = weight_MX.split(width, dim=1)
    logits = sum_tensors([project_float32(x, weight) for x, weight in zip(streams, weights, strict=True)])
    squares = sum_tensors([x.float().square() for x in streams]).sum(-1, keepdim=True)
    return logits * torch.rsqrt(squares / (len(streams) * width) + eps)


def sum_tensors(terms: list[Tensor]) -> Tensor:
    """Returns the sum of one or more tensors, in order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def read_streams(streams: Streams, pre_BTN: Tensor) -> Tensor:
    """Returns sum_s pre_s X_s, [B, T, D], summed in float32 and rounded once to the streams' dtype."""
    terms = [pre * x.float() for pre, x in zip(pre_BTN.split(1, dim=-1), streams, strict=True)]
    return sum_tensors(terms).to(streams[0].dtype)


def write_streams(streams: Streams, y_BTD: Tensor, res_BTNN: Tensor | None, post_BTN: Tensor) -> Streams:
    """Returns the new streams X'_t = sum_s res[s, t] X_s + post_t y, summed in float32 and rounded once."""
    num_streams = len(streams)
    posts = post_BTN.split(1, dim=-1)
    new = []
    for t in range(num_streams):
        if res_BTNN is None:
            kept = [streams[t].float()]
        else:
            kept = [res_BTNN[..., s, t, None] * streams[s].float() for s in range(num_streams)]
        new.append(sum_tensors([*kept, posts[t] * y_BTD.float()]).to(y_BTD.dtype))
    return tuple(new)


class MultiStream(Residual):
    """N streams, copies of x0 at the start, averaged at the end; a subclass generates the coefficients.

    lambda and mu act on every stream.
    """

    Options = StreamOptions
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
        return StreamState((x0_BTD,) * self.num_streams, self.first_memo(x0_BTD.device))

    def scale(self, state: StreamState, lambda_: Tensor, mu: Tensor, x0_BTD: Tensor) -> StreamState:
        streams = tuple((lambda_ * x.float() + mu * x0_BTD.float()).to(x.dtype) for x in state.streams)
        return StreamState(streams, state.memo)

    def read(self, state: StreamState, sublayer: int) -> ResidualRead:
        weights = self.coefficients(state, sublayer)
        u_BTD = read_streams(state.streams, weights.pre_BTN)
        return ResidualRead(u_BTD, u_BTD, u_BTD, weights)

    def write(self, state: StreamState, sublayer: int, y_BTD: Tensor, context: Coefficients) -> StreamState:
        return StreamState(write_streams(state.streams, y_BTD, context.res_BTNN, context.post_BTN), context.memo)

    def collapse(self, state: StreamState) -> Tensor:
        total = sum_tensors([x.float() for x in state.streams])
        return (total / self.num_streams).to(state.streams[0].dtype)

    def extra_macs(self) -> float:
        """(N^2 + 2N) D per sublayer: reading, mixing and writing; 2N D without mixing."""
        per_channel = 2 * self.num_streams + (self.num_streams**2 if self.has_stream_mixing else 0)
        return self.num_sublayers * per_channel * self.width
