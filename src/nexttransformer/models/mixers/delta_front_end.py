"""What the delta-rule mixers share: projections, short convolutions, unit-length q and k, gated output norm, state.

Equations (h normalized input): q, k, v = SiLU(conv4(W_q h)), SiLU(conv4(W_k h)), SiLU(conv4(W_v h)); on layers with a
table v <- v + 3 sigmoid(G h[:12]) * VE; q, k <- x / sqrt(sum x^2 + 1e-6); beta = sigmoid(W_b h);
y = W_o [rms(o) gamma * gate], rms over the value dim with eps 1e-5 and one gamma for all heads. No rotary positions.
q and output gates read the query input, k, decay and beta the key input, v and G the value input.
Groups: c_q, c_k, c_v, c_proj matrix; ve_gate matrix_parity; c_beta, convolutions, A_log, norm_gain small.
Init: projections U(-s, s), c_proj 0, convolutions U(-1/2, 1/2), norm_gain 1, ve_gate U(0, 0.02).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.budget_formulas import delta_rule_macs
from nexttransformer.models.layers import CausalConv, Linear, joint_linear, projection_bound, rms_norm
from nexttransformer.models.mixers.attention import make_value_gate, value_factor
from nexttransformer.models.parts import Mixer, MixerInput, Rope, constant, uniform, zeros
from nexttransformer.ops import backends
from nexttransformer.ops.convolved_heads import convolved_heads
from nexttransformer.ops.decay import draw_rate_log

OUTPUT_NORM_EPS = 1e-5


class DeltaState(NamedTuple):
    """State after a token: the recurrent state (float32) and the last I = 3 inputs of the q, k and v convolutions."""

    recurrent_BHKV: Tensor
    cache_BIE: Tensor


class DeltaMixer(Mixer):
    """Base of the delta-rule mixers; a subclass adds the output gate, the decay and the recurrence.

    Class attributes: `rate_range` is the initial range of A per head.
    """

    rate_range = (0.0, 16.0)

    def __init__(self, config: ModelConfig, layer: int, *, has_value_row: bool) -> None:
        super().__init__(config, layer, has_value_row=has_value_row)
        width, bound = config.width, projection_bound(config.width)
        self.c_q = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_k = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_v = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.q_conv, self.k_conv, self.v_conv = CausalConv(width), CausalConv(width), CausalConv(width)
        self.c_beta = Linear(width, self.num_heads, tag="small", init=uniform(-bound, bound))
        self.declare("A_log", (self.num_heads,), tag="small", init=partial(draw_rate_log, *self.rate_range))
        self.declare("norm_gain", (self.head_dim,), tag="small", init=constant(1.0))
        self.c_proj = Linear(width, width, tag="matrix", init=zeros())
        if has_value_row:
            self.ve_gate = make_value_gate(config.num_heads)

    def _gate_layers(self) -> tuple[Linear, Linear]:
        """Returns the first layers of the output gate (of the query input) and of the decay (of the key input)."""
        raise TypeError(f"{type(self).__name__} must define _gate_layers")

    def _gate(self, z: Tensor) -> Tensor:
        """Returns the factor of the normalized output, float32 [B, T, H, V], from its first layer's output."""
        raise TypeError(f"{type(self).__name__} must define _gate")

    def _decay(self, z: Tensor) -> Tensor:
        """Returns the log decay, float32 [B, T, H] or [B, T, H, K], from its first layer's output."""
        raise TypeError(f"{type(self).__name__} must define _decay")

    def _write_strength(self, z_BTH: Tensor) -> Tensor:
        """Returns beta, float32 [B, T, H]."""
        return torch.sigmoid(z_BTH.float())

    def _project(self, x: MixerInput) -> list[Tensor]:
        """Returns raw q, k, v side by side, output gate, decay and beta; three products where roles share an input."""
        gate, decay = self._gate_layers()
        if not (x.query is x.key and x.key is x.value):
            qkv_BTE = torch.cat([self.c_q(x.query), self.c_k(x.key), self.c_v(x.value)], dim=-1)
            return [qkv_BTE, gate(x.query), decay(x.key), self.c_beta(x.key)]
        layers = [gate, decay, self.c_beta]
        # The few rows per head stay apart: beside the wide ones they would break the alignment of every row.
        num_wide = 1 if decay.weight.shape[0] == self.num_heads else 2
        outputs = [joint_linear(x.query, self.c_q, self.c_k, self.c_v)]
        for group in (layers[:num_wide], layers[num_wide:]):
            sizes = [layer.weight.shape[0] for layer in group]
            outputs += joint_linear(x.query, *group).split(sizes, dim=-1)
        return outputs

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, want_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the recurrence (see `ops`)."""
        raise TypeError(f"{type(self).__name__} must define _mix")

    def forward(
        self,
        x: MixerInput,
        value_row_BTD: Tensor | None,
        rope: Rope,
        *,
        state: DeltaState | None = None,
        want_state: bool = False,
    ) -> tuple[Tensor, DeltaState | None]:
        qkv_BTE, gate, decay, strength = self._project(x)
        convs = (self.q_conv, self.k_conv, self.v_conv)
        cache_BIE = state.cache_BIE if state is not None else None
        q, k, v = convolved_heads(
            qkv_BTE,
            torch.cat([conv.weight for conv in convs]),
            num_heads=self.num_heads,
            value_row_BTD=value_row_BTD,
            value_factor_BTH=None if value_row_BTD is None else value_factor(self.ve_gate, x.value),
            cache_BIE=cache_BIE,
        )
        initial = state.recurrent_BHKV if state is not None else None
        o_BTHV, recurrent_BHKV = self._mix(
            q, k, v, self._decay(decay), self._write_strength(strength), initial, want_state
        )
        normalized_BTHV = rms_norm(o_BTHV.float(), OUTPUT_NORM_EPS) * self.norm_gain
        y_BTHV = (normalized_BTHV * self._gate(gate)).to(o_BTHV.dtype)
        y_BTD = self.c_proj(y_BTHV.flatten(2))
        if recurrent_BHKV is None:
            return y_BTD, None
        return y_BTD, DeltaState(recurrent_BHKV, self.q_conv.next_cache(qkv_BTE, cache_BIE))

    def prepare(self, num_tokens: int, device: torch.device) -> None:
        if device.type == "cuda":
            # The recurrence, which comes first, is fla-core's.
            backends.ensure_path(self.fused_ops[0])

    def mix_macs(self, num_tokens: int) -> float:
        return delta_rule_macs(self.num_heads, self.head_dim, self.head_dim)

    def decode_state_bytes(self, num_tokens: int) -> int:
        # Three convolutions of four taps each keep three bfloat16 inputs per channel.
        conv_bytes = 3 * 3 * self.num_heads * self.head_dim * 2
        return self.num_heads * self.head_dim * self.head_dim * 4 + conv_bytes
