"""Kimi Delta Attention: the gated delta rule with one forget rate per key channel.

Every channel of the key decides for itself how fast it forgets, through a low-rank map of the input. The output gate
is low-rank too, which frees weights for the MLP. All else is Gated DeltaNet.
Equations: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T; o_t = S_t^T q_t / sqrt(K);
alpha = exp(-exp(A_log) softplus(W_f2 W_f1 h + dt_bias)) per head and channel, A_log per head;
y = W_o [rms(o) gamma * sigmoid(W_g2 W_g1 h + c)]; rank 128 (the head dim); the rest in `delta_front_end`.
Source: arXiv 2510.26692; fla/layers/kda.py of fla-core 0.6.0. Deviations: value embeddings added to v after the
convolution, base initialization (both factors of a pair as the base projections).
Groups: decay_down, decay_up, gate_down, gate_up low_rank; A_log, dt_bias, gate_bias small; others in `delta_front_end`.
Init: the pairs U(-s, s) with s of the model width; A_log = log U(1, 16); dt_bias = softplus^-1 of log-uniform
[1e-3, 1e-1]; gate_bias 0. Step dependence: none. FLOPs: -4.42 % of the baseline, matched by MLP width 6656 (+0.25 %).
"""

from torch import Tensor, sigmoid

from nexttransformer.config import ModelConfig
from nexttransformer.models.layers import Linear, projection_bound
from nexttransformer.models.mixers.delta_front_end import DeltaMixer
from nexttransformer.models.parts import Options, uniform, zeros
from nexttransformer.ops.decay import draw_step_bias, log_decay
from nexttransformer.ops.kimi_delta_attention import kimi_delta_attention


class KimiDeltaAttention(DeltaMixer):
    """The delta rule with per-channel decay and low-rank gates."""

    fused_ops = ("kimi_delta_attention", "convolved_heads")
    rate_range = (1.0, 16.0)

    def __init__(self, config: ModelConfig, layer: int, options: Options, *, has_value_row: bool) -> None:
        super().__init__(config, layer, has_value_row=has_value_row)
        width, rank, bound = config.width, self.head_dim, projection_bound(config.width)
        self.decay_down = Linear(width, rank, tag="low_rank", init=uniform(-bound, bound))
        self.decay_up = Linear(rank, width, tag="low_rank", init=uniform(-bound, bound))
        self.gate_down = Linear(width, rank, tag="low_rank", init=uniform(-bound, bound))
        self.gate_up = Linear(rank, width, tag="low_rank", init=uniform(-bound, bound))
        self.declare("dt_bias", (width,), tag="small", init=draw_step_bias)
        self.declare("gate_bias", (width,), tag="small", init=zeros())

    def _gate_layers(self) -> tuple[Linear, Linear]:
        return self.gate_down, self.decay_down

    def _gate(self, z: Tensor) -> Tensor:
        z_BTD = self.gate_up(z).float() + self.gate_bias
        return sigmoid(z_BTD).unflatten(-1, (self.num_heads, self.head_dim))

    def _decay(self, z: Tensor) -> Tensor:
        heads = (self.num_heads, self.head_dim)
        return log_decay(self.decay_up(z).unflatten(-1, heads), self.A_log[:, None], self.dt_bias.view(heads))

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, want_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        return kimi_delta_attention(q, k, v, g, beta, initial_state_BHKV=initial, want_state=want_state)
