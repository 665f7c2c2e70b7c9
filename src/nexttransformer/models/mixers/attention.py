"""Softmax attention, full or windowed: the base mixer.

Equations (h normalized input): q, k, v = W_q h, W_k h, W_v h; v <- v + 3 sigmoid(G h[:12]) * VE per head;
q, k <- g n(rope(q)), g n(rope(k)) with g = 1.2; y = W_o softmax(q k / sqrt(K)) v over visible keys.
Source: karpathy/nanochat nanochat/gpt.py. Deviation: windows are explicit, a full layer has no limit.
Groups: c_q, c_k, c_v, c_proj matrix; ve_gate matrix_parity. Init: U(-s, s), c_proj 0, ve_gate U(0, 0.02).
FLOPs: 2 H K k(W) multiply-adds per token beside the projections, k(W) the mean number of visible keys.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.budget_formulas import softmax_attention_macs
from nexttransformer.models.layers import Linear, joint_linear, projection_bound
from nexttransformer.models.parts import Mixer, MixerInput, Options, Rope, uniform, zeros
from nexttransformer.ops.attention import AttentionPlan, attention, plan_attention
from nexttransformer.ops.rotary_heads import rotary_heads
from nexttransformer.ops.rotary_heads.naive import mix_value_row

VE_GATE_CHANNELS = 12


class AttentionState(NamedTuple):
    """Keys and values so far, [B, S, H, K] each, rotated and normalized; cut to the window."""

    k_BSHK: Tensor
    v_BSHK: Tensor


class AttentionOptions(Options):
    """`window`: visible keys to the left of the query's own (512 shows 513 keys); None is unlimited."""

    window: int | None = Field(default=None, ge=1)


def value_factor(gate: Linear, value_in_BTD: Tensor) -> Tensor:
    """Returns 3 sigmoid(G h[:12]), the factor of the value-embedding row per head, [B, T, H] float32."""
    return 3.0 * torch.sigmoid(gate(value_in_BTD[..., :VE_GATE_CHANNELS]).float())


def add_value_row(v_BTHK: Tensor, row_BTD: Tensor, gate: Linear, value_in_BTD: Tensor) -> Tensor:
    """Adds the gated value-embedding row to v, per head; float32 inside, one rounding."""
    return mix_value_row(v_BTHK, row_BTD, value_factor(gate, value_in_BTD))


def make_value_gate(num_heads: int) -> Linear:
    """Returns the value-embedding gate G of a layer with a table, (H, 12)."""
    return Linear(VE_GATE_CHANNELS, num_heads, tag="matrix_parity", init=uniform(0.0, 0.02))


class Attention(Mixer):
    """Causal softmax attention with rotary positions and QK norm."""

    Options = AttentionOptions
    uses_rope = True
    fused_ops = ("attention",)

    def __init__(self, config: ModelConfig, layer: int, options: AttentionOptions, *, has_value_row: bool) -> None:
        super().__init__(config, layer, has_value_row=has_value_row)
        self.options = options
        self.qk_gain = config.qk_gain
        width, bound = config.width, projection_bound(config.width)
        self.c_q = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_k = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_v = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_proj = Linear(width, width, tag="matrix", init=zeros())
        if has_value_row:
            self.ve_gate = make_value_gate(config.num_heads)
        self._plan: AttentionPlan | None = None

    def prepare(self, num_tokens: int, device: torch.device) -> None:
        self._plan = plan_attention(num_tokens, self.options.window, device)

    def forward(
        self,
        x: MixerInput,
        value_row_BTD: Tensor | None,
        rope: Rope,
        *,
        state: AttentionState | None = None,
        want_state: bool = False,
    ) -> tuple[Tensor, AttentionState | None]:
        if x.query is x.key and x.key is x.value:
            qkv_BTE = joint_linear(x.query, self.c_q, self.c_k, self.c_v)
        else:
            qkv_BTE = torch.cat([self.c_q(x.query), self.c_k(x.key), self.c_v(x.value)], dim=-1)
        q, k, v = rotary_heads(
            qkv_BTE,
            rope.cos,
            rope.sin,
            num_heads=self.num_heads,
            qk_gain=self.qk_gain,
            value_row_BTD=value_row_BTD,
            value_factor_BTH=value_factor(self.ve_gate, x.value) if value_row_BTD is not None else None,
        )
        if state is not None:
            k, v = torch.cat([state.k_BSHK, k], dim=1), torch.cat([state.v_BSHK, v], dim=1)
        y_BTHK = attention(q, k, v, window=self.options.window, plan=self._plan)
        y_BTD = self.c_proj(y_BTHK.flatten(2))
        if not want_state:
            return y_BTD, None
        keep = k.shape[1] if self.options.window is None else self.options.window
        return y_BTD, AttentionState(k[:, -keep:], v[:, -keep:])

    def mix_macs(self, num_tokens: int) -> float:
        return softmax_attention_macs(self.num_heads, self.head_dim, self.head_dim, num_tokens, self.options.window)

    def nominal_mix_macs(self, num_tokens: int) -> float:
        window = num_tokens if self.options.window is None else min(self.options.window, num_tokens)
        return 2 * self.num_heads * self.head_dim * window

    def decode_state_bytes(self, num_tokens: int) -> int:
        kept = num_tokens if self.options.window is None else min(self.options.window, num_tokens)
        return kept * self.num_heads * 2 * self.head_dim * 2
