"""Attention residuals: every read is a softmax over depth of earlier outputs.

Shape letters: R reads (one per sublayer after the first, and one before the head).

Equations: sources s_0 = x0 and s_i = output of sublayer i; read j has a pseudo-query w_j in R^D:
    u = sum_i softmax_i( w_j . n(s_i) ) s_i, n with eps 1e-6, logits and sums in float32.
Sublayer 0 has the one source x0, hence no query. Block form: the sources are x0, the sums of completed
blocks of `block_sublayers` sublayers, and the running sum of the open block if it is not empty.
The logits of a source for all later reads come from one product when the source is complete, so a source
is read once for its logits and once per mix.
Source: arXiv 2603.15031; fla-org/flash-linear-attention fla/ops/attnres. Deviation: no key gain (it folds
into w). Replaces lambda, mu and backout.
Groups: coefficient, float32. Init: w = 0 (uniform mean). Step dependence: none.
FLOPs: 2 D multiply-adds per source and read; +0.45 % full, +0.10 % in blocks of 6.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.parts import Options, Residual, ResidualRead, zeros
from nexttransformer.models.residuals.streams import project_float32, sum_tensors
from nexttransformer.ops.materialize import materialize
from nexttransformer.ops.norm import squared_norm

SOURCE_EPS = 1e-6


class AttentionResidualOptions(Options):
    """`block_sublayers`: sublayers whose outputs are summed to one source; None keeps every output (full form)."""

    block_sublayers: int | None = Field(default=None, ge=2)


class Source(NamedTuple):
    """One source [B, T, D] and its logits [B, T, R'] for reads `first_read` .. `first_read` + R' - 1."""

    x_BTD: Tensor
    logits_BTR: Tensor
    first_read: int


class SourceState(NamedTuple):
    """Complete sources in order, and the running sum of the open block or None."""

    complete: tuple[Source, ...]
    running: Source | None


class AttentionResiduals(Residual):
    """The residual scheme attnres, full or in blocks. Read j belongs to sublayer j; the last one to the head."""

    Options = AttentionResidualOptions
    keeps_skeleton_scalars = False

    def __init__(self, config: ModelConfig, options: AttentionResidualOptions) -> None:
        super().__init__(config)
        self.width = config.width
        self.block_sublayers = options.block_sublayers or 1
        # Row j - 1 is w_j.
        self.declare("queries", (self.num_sublayers, config.width), tag="coefficient", init=zeros())

    def init(self, x0_BTD: Tensor) -> SourceState:
        return SourceState((self._source(x0_BTD, 1, self.num_sublayers),), None)

    def _source(self, x_BTD: Tensor, first_read: int, last_read: int) -> Source:
        """Returns a source with its logits w_j . n(x) for the reads that will use it."""
        logits_BTR = project_float32(x_BTD, self.queries[first_read - 1 : last_read])
        factor_BT1 = torch.rsqrt(squared_norm(x_BTD) / self.width + SOURCE_EPS)[..., None]
        return Source(x_BTD, logits_BTR * factor_BT1, first_read)

    def _mix(self, state: SourceState, read: int) -> Tensor:
        sources = [*state.complete, *([state.running] if state.running is not None else [])]
        if len(sources) == 1:
            return sources[0].x_BTD
        logits_BTS = torch.stack([source.logits_BTR[..., read - source.first_read] for source in sources], dim=-1)
        weights = materialize(torch.softmax(logits_BTS, dim=-1)).split(1, dim=-1)
        terms = [weight * source.x_BTD for weight, source in zip(weights, sources, strict=True)]
        return sum_tensors(terms).to(sources[0].x_BTD.dtype)

    def read(self, state: SourceState, sublayer: int) -> ResidualRead:
        u_BTD = self._mix(state, sublayer)
        return ResidualRead(u_BTD, u_BTD, u_BTD)

    def write(self, state: SourceState, sublayer: int, y_BTD: Tensor, context: None) -> SourceState:
        if state.running is not None:
            y_BTD = state.running.x_BTD + y_BTD
        next_read = sublayer + 1
        if next_read % self.block_sublayers == 0:
            return SourceState((*state.complete, self._source(y_BTD, next_read, self.num_sublayers)), None)
        return SourceState(state.complete, self._source(y_BTD, next_read, next_read))

    def collapse(self, state: SourceState) -> Tensor:
        return self._mix(state, self.num_sublayers)

    def extra_macs(self) -> float:
        """2 D per source and read: the logit and the sum. The queries' product is counted here."""
        block = self.block_sublayers
        sources = [1 + read // block + (read % block > 0) for read in range(1, self.num_sublayers + 1)]
        return 2 * self.width * sum(sources)
