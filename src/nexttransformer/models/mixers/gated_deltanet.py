"""Gated DeltaNet: a linear-time mixer whose state forgets by a scalar per head and token and is edited by delta writes.

The state S of each head is a K x V map read with the query. Before a write, what the map already returns for the key
is subtracted (delta rule), scaled by beta; the decay alpha lets a head drop everything at once. Costs no attention.
Equations: S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T; o_t = S_t^T q_t / sqrt(K);
alpha = exp(-exp(A_log) softplus(W_a h + dt_bias)) per head; y = W_o [rms(o) gamma * SiLU(W_g h)]; the rest in
`delta_front_end`. Order inside a token: decay, delta read, write, output read.
Source: arXiv 2412.06464; fla/layers/gated_deltanet.py of fla-core 0.6.0. Deviations: 12 heads of 128 for keys and
values (5 D^2 weights), value embeddings added to v after the convolution, base initialization.
Groups: c_gate matrix; c_decay, A_log, dt_bias small; others in `delta_front_end`.
Init: c_gate, c_decay U(-s, s); A_log = log U(0, 16); dt_bias = softplus^-1 of log-uniform [1e-3, 1e-1].
Step dependence: none. FLOPs: +0.31 % of the baseline at equal depth and MLP width.
"""

from torch import Tensor
from torch.nn.functional import silu

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Linear, projection_bound
from nexttransformer.models.mixers.delta_front_end import DeltaMixer
from nexttransformer.models.parts import Options, uniform
from nexttransformer.ops.decay import draw_step_bias, log_decay
from nexttransformer.ops.gated_delta_rule import gated_delta_rule


class GatedDeltaNetOptions(Options):
    """`negative_eigenvalues`: beta = 2 sigmoid(.), so that a write may reflect the state along its key."""

    negative_eigenvalues: bool = False


class GatedDeltaNet(DeltaMixer):
    """The gated delta rule with a full output gate."""

    Options = GatedDeltaNetOptions
    fused_ops = ("gated_delta_rule", "convolved_heads")
    rate_range = (0.0, 16.0)

    def __init__(self, config: ModelConfig, layer: int, options: GatedDeltaNetOptions, *, has_value_row: bool) -> None:
        super().__init__(config, layer, has_value_row=has_value_row)
        self.options = options
        width, bound = config.width, projection_bound(config.width)
        self.c_gate = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_decay = Linear(width, self.num_heads, tag="small", init=uniform(-bound, bound))
        self.declare("dt_bias", (self.num_heads,), tag="small", init=draw_step_bias)

    def _gate_layers(self) -> tuple[Linear, Linear]:
        return self.c_gate, self.c_decay

    def _gate(self, z: Tensor) -> Tensor:
        return silu(z.float()).unflatten(-1, (self.num_heads, self.head_dim))

    def _decay(self, z: Tensor) -> Tensor:
        return log_decay(z, self.A_log, self.dt_bias)

    def _write_strength(self, z_BTH: Tensor) -> Tensor:
        strength_BTH = super()._write_strength(z_BTH)
        return 2 * strength_BTH if self.options.negative_eigenvalues else strength_BTH

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, want_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        return gated_delta_rule(q, k, v, g, beta, initial_state_BHKV=initial, want_state=want_state)
