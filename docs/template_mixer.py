"""Template of a mixer: linear attention whose memory fades at one learned rate per head. Copy it and change it.

Each head keeps a matrix S that adds the outer product of key and value of every token and shrinks by a factor a
before each addition; the query reads it. Unlike softmax attention the state does not grow with the sequence.
Equations (h normalized input): q, k, v = W_q h, W_k h, W_v h; v <- v + 3 sigmoid(G h[:12]) * VE; q, k <- n(q), n(k);
S_t = a S_(t-1) + k_t v_t^T; o_t = S_t^T q_t / K; y = W_o n(o), a = sigmoid(fade) per head, n RMS norm per head.
Source: retention, arXiv 2307.08621. Deviations: a is learned, no rotary positions, no output gate.
Groups: c_q, c_k, c_v, c_proj matrix; ve_gate matrix_parity; fade small.
Init: projections U(-s, s), c_proj 0, fade 1 to 6 over heads (a from 0.73 to 0.998).
Step dependence: none. FLOPs: -7.89 % of the baseline, matched by MLP width 7040 (+0.29 %).
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.budget_formulas import decayed_linear_macs
from nexttransformer.models.layers import Linear, projection_bound, rms_norm
from nexttransformer.models.mixers.attention import add_value_row, make_value_gate
from nexttransformer.models.parts import Mixer, MixerInput, Options, Rope, uniform, values, zeros


class TemplateOptions(Options):
    """What the JSON file may set beside "type". `is_normalized`: whether q and k are normalized."""

    is_normalized: bool = True


class TemplateMixer(Mixer):
    """Linear attention with one learned fading rate per head."""

    Options = TemplateOptions

    def __init__(self, config: ModelConfig, layer: int, options: TemplateOptions, *, has_value_row: bool) -> None:
        super().__init__(config, layer, has_value_row=has_value_row)
        self.options = options
        width, bound = config.width, projection_bound(config.width)
        # Weights in Linear are counted, initialized, grouped and saved without further code.
        self.c_q = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_k = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        self.c_v = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        # The output starts at zero, so that training starts at the plain Transformer's first loss.
        self.c_proj = Linear(width, width, tag="matrix", init=zeros())
        if has_value_row:
            self.ve_gate = make_value_gate(config.num_heads)
        # Everything that is not a Linear, Lookup or CausalConv is declared with its tag and initial values.
        rates = torch.linspace(1.0, 6.0, config.num_heads, device="cpu")
        self.declare("fade", (config.num_heads,), tag="small", init=values(rates))

    def forward(
        self,
        x: MixerInput,
        value_row_BTD: Tensor | None,
        rope: Rope,
        *,
        state: Tensor | None = None,
        want_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        heads = (self.num_heads, self.head_dim)
        q, k = self.c_q(x.query).unflatten(-1, heads), self.c_k(x.key).unflatten(-1, heads)
        v = self.c_v(x.value).unflatten(-1, heads)
        if value_row_BTD is not None:
            v = add_value_row(v, value_row_BTD, self.ve_gate, x.value)
        if self.options.is_normalized:
            q, k = rms_norm(q), rms_norm(k)
        # The recurrence runs in float32, as all states do. [B, H, T, K] from here.
        q, k, v = (y.float().transpose(1, 2) for y in (q / self.head_dim, k, v))
        log_a_H11 = functional.logsigmoid(self.fade)[:, None, None]
        num_tokens = q.shape[2]
        age = torch.arange(num_tokens, device=q.device, dtype=torch.float32)
        # Weight of token s in output t: a^(t-s), and nothing from later tokens.
        distance_TS = age[:, None] - age[None, :]
        fading_HTS = (log_a_H11 * distance_TS).masked_fill(distance_TS < 0, -torch.inf).exp()
        o_BHTV = (q @ k.transpose(-1, -2) * fading_HTS) @ v
        if state is not None:
            o_BHTV = o_BHTV + (log_a_H11 * (age[:, None] + 1)).exp() * (q @ state)
        y_BTHV = rms_norm(o_BHTV.transpose(1, 2)).to(x.value.dtype)
        y_BTD = self.c_proj(y_BTHV.flatten(2))
        if not want_state:
            return y_BTD, None
        left_HT1 = (log_a_H11 * (num_tokens - 1 - age[:, None])).exp()
        new_BHKV = (left_HT1 * k).transpose(-1, -2) @ v
        if state is not None:
            new_BHKV = new_BHKV + (log_a_H11 * num_tokens).exp() * state
        return y_BTD, new_BHKV

    def mix_macs(self, num_tokens: int) -> float:
        return decayed_linear_macs(self.num_heads, self.head_dim, self.head_dim)

    def decode_state_bytes(self, num_tokens: int) -> int:
        return self.num_heads * self.head_dim * self.head_dim * 4
