"""Manifold-constrained hyper-connections: mhc, mhc_lite and simple_hc.

Shape letters: J permutations (N!).

Equations, per sublayer and token, all coefficients in float32:
    [p, q, r] = n(vec X) Phi^T (one norm over N*D, eps 1e-6; rows: read N, write N, mix)
    pre = sigmoid(a1 p + b1);  post = 2 sigmoid(a2 q + b2)
    mhc        res = Sinkhorn(a3 r + b3), r in R^(N x N) row-major res[s, t]
    mhc_lite   res = sum_j softmax(a3 r + b3)_j P_j over the N! permutation matrices: exactly doubly stochastic
    simple_hc  res = I; the streams that feed n(vec X) are those of the last sublayer divisible by 4
    u = sum_s pre_s X_s;  X'_t = sum_s res[s, t] X_s + post_t y;  the head reads the mean of the streams
Sinkhorn: row softmax + 1e-6, column normalization, then 19 times rows and columns. Ending on columns makes
each new stream a convex combination of the old ones.
lambda, mu (on every stream) and backout are kept.
Sources: mhc arXiv 2512.24880 and deepseek-ai/TileKernels; mhc_lite arXiv 2601.05732 and FFTYYY/mhc-lite;
simple_hc has no public code: activations and init are mhc's.
Groups: all coefficient. Init: Phi = 0, a = 0.01, b1 = b2 = -1 but +1 on stream (sublayer mod N); b3 = 0 on the
diagonal (the identity permutation) and -8 elsewhere. Step dependence: none.
FLOPs: (weights of Phi) + (N^2 + 2N) D multiply-adds per sublayer and token, 2N D for simple_hc.
"""

import itertools
import math

import torch
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.parts import Part, constant, values
from nexttransformer.models.residuals.streams import (
    Coefficients,
    MultiStream,
    StreamGenerator,
    StreamOptions,
    StreamState,
    generate_logits,
)
from nexttransformer.ops.sinkhorn import sinkhorn

GENERATOR_EPS = 1e-6
SINKHORN_EPS = 1e-6
SINKHORN_ROUNDS = 20
FAR_LOGIT = -8.0
REFRESH_SUBLAYERS = 4


def permutation_matrices(num_streams: int, device: torch.device | str) -> Tensor:
    """Returns the N! matrices [J, N, N], 1 at [j, s, t] where permutation j sends s to t; j = 0 is the identity."""
    permutations = list(itertools.permutations(range(num_streams)))
    # Rows of the identity instead of an index tensor: nothing has to be copied from the host.
    rows = torch.eye(num_streams, device=device).unbind()
    return torch.stack([torch.stack([rows[t] for t in permutation]) for permutation in permutations])


class SublayerGates(Part):
    """Parameters of one sublayer: Phi `generator`, `bias` (b1, b2, b3) and `scale` (a1, a2 and a3 if it mixes)."""

    def __init__(self, num_streams: int, width: int, sublayer: int, mix_bias: Tensor) -> None:
        super().__init__()
        stream_bias = torch.full((num_streams,), -1.0, device="cpu")
        stream_bias[sublayer % num_streams] = 1.0
        bias = torch.cat([stream_bias, stream_bias, mix_bias])
        self.generator = StreamGenerator(num_streams, width, bias.numel())
        self.declare("bias", (bias.numel(),), tag="coefficient", init=values(bias))
        self.declare("scale", (3 if mix_bias.numel() else 2,), tag="coefficient", init=constant(0.01))

    def split_logits(self, logits_BTM: Tensor, num_streams: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pre, post [B, T, N] and the logits of the stream mixing [B, T, M - 2N]."""
        sizes = [num_streams, num_streams, logits_BTM.shape[-1] - 2 * num_streams]
        read, write, mix = logits_BTM.split(sizes, dim=-1)
        read_bias, write_bias, mix_bias = self.bias.split(sizes)
        pre = torch.sigmoid(self.scale[0] * read + read_bias)
        post = 2 * torch.sigmoid(self.scale[1] * write + write_bias)
        return pre, post, self.scale[2] * mix + mix_bias if sizes[2] else mix


class ManifoldHyperConnections(MultiStream):
    """The residual scheme mhc."""

    fused_ops = (*MultiStream.fused_ops, "sinkhorn")

    def __init__(self, config: ModelConfig, options: StreamOptions) -> None:
        super().__init__(config, options)
        self.sublayers = torch.nn.ModuleList(
            SublayerGates(self.num_streams, config.width, sublayer, self.mix_bias())
            for sublayer in range(self.num_sublayers)
        )

    def mix_bias(self) -> Tensor:
        """Returns the initial logits b3 of the stream mixing."""
        return (FAR_LOGIT * (1 - torch.eye(self.num_streams, device="cpu"))).flatten()

    def gates(self, sublayer: int) -> SublayerGates:
        """Returns the parameters of a sublayer."""
        gates = self.sublayers[sublayer]
        assert isinstance(gates, SublayerGates)
        return gates

    def logits(self, state: StreamState, weight_MX: Tensor) -> Tensor:
        """Returns n(vec X) W^T with one norm over all streams, float32 [B, T, M]; weight (M, N*D)."""
        return generate_logits(state.streams_BTND.flatten(2), state.squares_BTN.sum(-1), weight_MX, GENERATOR_EPS)

    def mix_streams(self, logits_BTM: Tensor, memo: tuple[Tensor, ...]) -> Tensor:
        """Returns res [B, T, N, N] from its logits."""
        logits_BTNN = logits_BTM.unflatten(-1, (self.num_streams, self.num_streams))
        return sinkhorn(logits_BTNN, num_rounds=SINKHORN_ROUNDS, eps=SINKHORN_EPS)

    def coefficients(self, state: StreamState, sublayer: int) -> Coefficients:
        gates = self.gates(sublayer)
        logits_BTM = self.logits(state, gates.generator.weight)
        pre_BTN, post_BTN, mix_BTM = gates.split_logits(logits_BTM, self.num_streams)
        return Coefficients(pre_BTN, self.mix_streams(mix_BTM, state.memo), post_BTN, state.memo)

    def unreached(self) -> dict[str, list[int]]:
        """Read gate and res of sublayer 0 and res of the last one.

        Streams are equal before sublayer 0: the norm after the read removes the sum of `pre`, and mixing
        equal streams changes nothing. The mean over streams does not see a doubly stochastic last res.
        """
        first = self._unreached(0, reads=True, mixes=True)
        return {**first, **self._unreached(self.num_sublayers - 1, reads=False, mixes=True)}

    def _unreached(self, sublayer: int, *, reads: bool, mixes: bool) -> dict[str, list[int]]:
        num_streams, bias = self.num_streams, self.gates(sublayer).declarations["bias"].shape[0]
        rows = [*range(num_streams)] * reads + [*range(2 * num_streams, bias)] * mixes
        prefix = f"sublayers.{sublayer}"
        return {
            f"{prefix}.generator.weight": rows,
            f"{prefix}.bias": rows,
            f"{prefix}.scale": [0] * reads + [2] * mixes,
        }


class ManifoldHyperConnectionsLite(ManifoldHyperConnections):
    """The residual scheme mhc_lite; its memo is the N! permutation matrices, flat [J, N*N]."""

    fused_ops = MultiStream.fused_ops

    def mix_bias(self) -> Tensor:
        bias = torch.full((math.factorial(self.num_streams),), FAR_LOGIT, device="cpu")
        bias[0] = 0.0
        return bias

    def first_memo(self, device: torch.device) -> tuple[Tensor, ...]:
        return (permutation_matrices(self.num_streams, device).flatten(1),)

    def mix_streams(self, logits_BTM: Tensor, memo: tuple[Tensor, ...]) -> Tensor:
        mixed_BTX = torch.softmax(logits_BTM, dim=-1) @ memo[0]
        return mixed_BTX.unflatten(-1, (self.num_streams, self.num_streams))


class SimpleHyperConnections(ManifoldHyperConnections):
    """The residual scheme simple_hc: no stream mixing.

    All gates up to the next refresh are generated in one product; its memo is the logits of the sublayers left.
    """

    fused_ops = MultiStream.fused_ops
    has_stream_mixing = False

    def mix_bias(self) -> Tensor:
        return torch.empty(0, device="cpu")

    def coefficients(self, state: StreamState, sublayer: int) -> Coefficients:
        logits = state.memo
        if sublayer % REFRESH_SUBLAYERS == 0:
            group = range(sublayer, min(sublayer + REFRESH_SUBLAYERS, self.num_sublayers))
            weight = torch.cat([self.gates(member).generator.weight for member in group])
            logits = self.logits(state, weight).chunk(len(group), dim=-1)
        pre_BTN, post_BTN, _ = self.gates(sublayer).split_logits(logits[0], self.num_streams)
        return Coefficients(pre_BTN, None, post_BTN, tuple(logits[1:]))

    def unreached(self) -> dict[str, list[int]]:
        """Equal streams before sublayer 0: the norm after the read removes the read gate."""
        return self._unreached(0, reads=True, mixes=False)
