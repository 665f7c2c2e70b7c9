"""Hyper-connections: N residual streams with learned, input-dependent reading, mixing and writing.

Equations, per sublayer and token, streams X_s, W (N+2, D) in rows read, mix_1..N, write:
    r_s = n(X_s) W^T;  pre_s = A_m[s] + a tanh(read_s);  res[s, t] = A_r[s, t] + a tanh(mix_s[t])
    post_s = B[s] + c tanh(write_s);  u = sum_s pre_s X_s;  X'_t = sum_s res[s, t] X_s + post_t y
The head reads the mean of the streams. lambda, mu (on every stream) and backout are kept.
Source: arXiv 2409.19606; lucidrains/hyper-connections.
Deviations: no gain in the norm; the dynamic parts are not decayed.
Groups: all coefficient, float32. Init: W = 0, a = c = 0.01, A_m one-hot at (sublayer mod N), A_r = I, B = 1:
equal to the plain residual. Step dependence: none.
FLOPs: N D (N+2) + (N^2 + 2N) D multiply-adds per sublayer and token, +0.44 % of the baseline.
"""

import torch

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import NORM_EPS, Linear
from nexttransformer.models.parts import Part, constant, values, zeros
from nexttransformer.models.residuals.streams import (
    Coefficients,
    MultiStream,
    StreamOptions,
    StreamState,
    generate_logits,
)


class HyperConnection(Part):
    """Parameters of one sublayer: W `generator`, A_m `read_bias`, A_r `mix_bias`, B `write_bias`, (a, c) `scale`."""

    def __init__(self, num_streams: int, width: int, sublayer: int) -> None:
        super().__init__()
        # One weight serves every stream, hence N uses per token.
        self.generator = Linear(width, num_streams + 2, tag="coefficient", init=zeros(), uses=num_streams)
        identity = torch.eye(num_streams, device="cpu")
        self.declare("read_bias", (num_streams,), tag="coefficient", init=values(identity[sublayer % num_streams]))
        self.declare("mix_bias", (num_streams, num_streams), tag="coefficient", init=values(identity))
        self.declare("write_bias", (num_streams,), tag="coefficient", init=constant(1.0))
        self.declare("scale", (2,), tag="coefficient", init=constant(0.01))

    def forward(self, state: StreamState) -> Coefficients:
        """Returns the sublayer's weights from its streams."""
        weight = self.generator.weight
        gates_BTNM = torch.tanh(generate_logits(state.streams_BTND, state.squares_BTN, weight, NORM_EPS))
        dynamic, write = self.scale.unbind()
        return Coefficients(
            self.read_bias + dynamic * gates_BTNM[..., 0],
            self.mix_bias + dynamic * gates_BTNM[..., 1:-1],
            self.write_bias + write * gates_BTNM[..., -1],
            (),
        )


class HyperConnections(MultiStream):
    """The residual scheme hc."""

    def __init__(self, config: ModelConfig, options: StreamOptions) -> None:
        super().__init__(config, options)
        self.sublayers = torch.nn.ModuleList(
            HyperConnection(self.num_streams, config.width, sublayer) for sublayer in range(self.num_sublayers)
        )

    def coefficients(self, state: StreamState, sublayer: int) -> Coefficients:
        return self.sublayers[sublayer](state)

    def unreached(self) -> dict[str, list[int]]:
        """Streams are equal before sublayer 0 and the norm after the read removes their weights' sum."""
        return {"sublayers.0.generator.weight": [0], "sublayers.0.read_bias": list(range(self.num_streams))}
