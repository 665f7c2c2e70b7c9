"""Softmax attention, full or windowed: the base mixer, with output gate, exclusive output and forget gate as options.

Equations (h normalized input): q, k, v = W_q h, W_k h, W_v h; v <- v + 3 sigmoid(G h[:12]) * VE per head;
q, k <- g n(rope(q)), g n(rope(k)) with g = 1.2; y = softmax(q k / sqrt(K)) v over visible keys; output W_o y. Options:
    exclusive  y <- y - tanh(a_h) (y.v) v / max(|v|^2, 1e-8) per head, v the token's own value as attention used it;
               "fixed": factor 1 instead of tanh(a_h)
    gate       y <- y * sigmoid(W_g h), one factor per head ("head") or per element ("element"), after `exclusive`
    forget     score_ts += sum_(j = s+1..t) log f_j, f = sigmoid(W_f h + b_f) per head, logs and sums in float32
Sources: karpathy/nanochat nanochat/gpt.py; exclusive arXiv 2603.09078 and KellerJordan/modded-nanogpt train_gpt.py
(learned form); gate arXiv 2505.06708 and qiuzh20/gated_attention; forget arXiv 2503.02130 and
fla-org/flash-linear-attention fla/layers/forgetting_attn.py.
Deviations: windows are explicit, a full layer has no limit; forget keeps rotary positions and starts near 1.
Groups: c_q, c_k, c_v, c_proj and the element gate matrix; ve_gate matrix_parity; head gate, exclusive_scale, f_gate,
f_bias small. Init: U(-s, s), c_proj 0, ve_gate U(0, 0.02), head gate U(-0.02, 0.02), exclusive_scale 0 (the base),
f_bias 4 to 8 over heads.
FLOPs: 2 H K k(W) multiply-adds per token beside the projections, k(W) the mean number of visible keys; exclusive
2 D more.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as functional
from pydantic import Field
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models.budget_formulas import softmax_attention_macs
from nexttransformer.models.layers import Linear, joint_linear, projection_bound
from nexttransformer.models.parts import Mixer, MixerInput, Options, Rope, uniform, values, zeros
from nexttransformer.ops.attention import AttentionPlan, attention, plan_attention
from nexttransformer.ops.backends import chosen_path
from nexttransformer.ops.forgetting_attention import forgetting_attention
from nexttransformer.ops.in_graph import in_graph
from nexttransformer.ops.norm import has_written_out_gradient
from nexttransformer.ops.rotary_heads import rotary_heads
from nexttransformer.ops.rotary_heads.naive import mix_value_row

VE_GATE_CHANNELS = 12
VALUE_SQUARE_FLOOR = 1e-8


class AttentionState(NamedTuple):
    """Keys and values so far, [B, S, H, K] each, rotated and normalized; log f if forgetting; cut to the window."""

    k_BSHK: Tensor
    v_BSHK: Tensor
    log_f_BSH: Tensor | None = None


class AttentionOptions(Options):
    """Options of softmax attention; the defaults are the base.

    Attributes:
        window: visible keys to the left of the query's own (512 shows 513 keys); None is unlimited.
        exclusive: whether a head's output loses its component along the token's own value.
        gate: sigmoid gate on the heads' outputs: one factor per head or per element.
        forget: whether scores decay by a data-dependent forget gate per head.
    """

    window: int | None = Field(default=None, ge=1, le=2**31 - 1)
    exclusive: Literal["none", "fixed", "learned"] = "none"
    gate: Literal["none", "head", "element"] = "none"
    forget: bool = False


def value_factor(gate: Linear, value_in_BTD: Tensor) -> Tensor:
    """Returns 3 sigmoid(G h[:12]), the factor of the value-embedding row per head, [B, T, H] float32."""
    return 3.0 * torch.sigmoid(gate(value_in_BTD[..., :VE_GATE_CHANNELS]).float())


def add_value_row(v_BTHK: Tensor, row_BTD: Tensor, gate: Linear, value_in_BTD: Tensor) -> Tensor:
    """Adds the gated value-embedding row to v, per head; float32 inside, one rounding."""
    return mix_value_row(v_BTHK, row_BTD, value_factor(gate, value_in_BTD))


def make_value_gate(num_heads: int) -> Linear:
    """Returns the value-embedding gate G of a layer with a table, (H, 12)."""
    return Linear(VE_GATE_CHANNELS, num_heads, tag="matrix_parity", init=uniform(0.0, 0.02))


def _excluded(y: Tensor, v: Tensor, amount_H1: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y - amount share v with share = (y . v) / max(v . v, floor), and v . v and share, per head and token.

    No amount is 1.
    """
    y32, v32 = y.float(), v.float()
    product = (y32 * v32).sum(-1, keepdim=True)
    square = v32.square().sum(-1, keepdim=True)
    share = product / square.clamp_min(VALUE_SQUARE_FLOOR)
    return (y32 - (share if amount_H1 is None else amount_H1 * share) * v32).to(y.dtype), square, share


class _ExcludeOwnValue(torch.autograd.Function):
    """`_excluded` with its gradient written out: as in `ops.norm`, y and v are kept as the attention keeps them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, amount_H1: Tensor | None) -> Tensor:
        output, square, share = _excluded(y, v, amount_H1)
        ctx.save_for_backward(y, v, amount_H1, square, share)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        y, v, amount_H1, square, share = ctx.saved_tensors
        (gradient,) = gradients
        along = (gradient.float() * v).sum(-1, keepdim=True)
        removed, dshare = share, -along
        if amount_H1 is not None:
            removed, dshare = amount_H1 * removed, amount_H1 * dshare
        dproduct = dshare / square.clamp_min(VALUE_SQUARE_FLOOR)
        # Below the floor the share does not change with v . v.
        dsquare = torch.where(square >= VALUE_SQUARE_FLOOR, -share * dproduct, 0.0)
        dy = gradient + dproduct * v
        dv = dproduct * y + 2 * dsquare * v - removed * gradient
        damount_H1 = -(along * share).sum((0, 1)) if amount_H1 is not None else None
        return dy.to(y.dtype), dv.to(v.dtype), damount_H1


@in_graph
def _exclude_own_value(y: Tensor, v: Tensor, amount_H1: Tensor | None) -> Tensor:
    return _ExcludeOwnValue.apply(y, v, amount_H1)


def exclude_own_value(y_BTHK: Tensor, v_BTHK: Tensor, scale_H: Tensor | None) -> Tensor:
    """Removes from each head's output its component along the token's own value, or tanh(scale) of it."""
    amount_H1 = torch.tanh(scale_H)[:, None] if scale_H is not None else None
    if has_written_out_gradient(y_BTHK):
        return _exclude_own_value(y_BTHK, v_BTHK, amount_H1)
    return _excluded(y_BTHK, v_BTHK, amount_H1)[0]


class Attention(Mixer):
    """Causal softmax attention with rotary positions and QK norm."""

    Options = AttentionOptions
    uses_rope = True
    fused_ops = ("attention", "rotary_heads")

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
        if options.exclusive == "learned":
            self.declare("exclusive_scale", (config.num_heads,), tag="small", init=zeros())
        if options.gate == "head":
            self.c_gate = Linear(width, config.num_heads, tag="small", init=uniform(-0.02, 0.02))
        elif options.gate == "element":
            self.c_gate = Linear(width, width, tag="matrix", init=uniform(-bound, bound))
        if options.forget:
            self.f_gate = Linear(width, config.num_heads, tag="small", init=uniform(-bound, bound))
            near_one = torch.linspace(4.0, 8.0, config.num_heads, device="cpu")
            self.declare("f_bias", (config.num_heads,), tag="small", init=values(near_one))
        self._plan: AttentionPlan | None = None

    @classmethod
    def fused_ops_of(cls, options: dict[str, Any]) -> tuple[str, ...]:
        return ("forgetting_attention", "rotary_heads") if options.get("forget") else cls.fused_ops

    def backend(self) -> str:
        if self._plan is None:
            return f"forgetting attention {chosen_path('forgetting_attention') or 'not chosen'}"
        window = "" if self.options.window is None else f" (window {self.options.window})"
        return f"attention {self._plan.backend}{window}"

    def prepare(self, num_tokens: int, device: torch.device) -> None:
        if not self.options.forget:
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
        own_v, log_f_BSH = v, None
        if self.options.forget:
            log_f_BSH = functional.logsigmoid(self.f_gate(x.key).float() + self.f_bias)
        if state is not None:
            k, v = torch.cat([state.k_BSHK, k], dim=1), torch.cat([state.v_BSHK, v], dim=1)
            if log_f_BSH is not None and state.log_f_BSH is not None:
                log_f_BSH = torch.cat([state.log_f_BSH, log_f_BSH], dim=1)
        if log_f_BSH is not None:
            y_BTHK = forgetting_attention(q, k, v, log_f_BSH, window=self.options.window)
        else:
            y_BTHK = attention(q, k, v, window=self.options.window, plan=self._plan)
        y_BTD = self.c_proj(self._gated(self._excluded(y_BTHK, own_v), x.query).flatten(2))
        if not want_state:
            return y_BTD, None
        keep = k.shape[1] if self.options.window is None else self.options.window
        kept_log_f = None if log_f_BSH is None else log_f_BSH[:, -keep:]
        return y_BTD, AttentionState(k[:, -keep:], v[:, -keep:], kept_log_f)

    def _excluded(self, y_BTHK: Tensor, v_BTHK: Tensor) -> Tensor:
        if self.options.exclusive == "none":
            return y_BTHK
        return exclude_own_value(y_BTHK, v_BTHK, self.exclusive_scale if self.options.exclusive == "learned" else None)

    def _gated(self, y_BTHK: Tensor, query_BTD: Tensor) -> Tensor:
        if self.options.gate == "none":
            return y_BTHK
        # [B, T, H, 1] or [B, T, H, K].
        factor = torch.sigmoid(self.c_gate(query_BTD).float()).unflatten(-1, (self.num_heads, -1))
        return (factor * y_BTHK).to(y_BTHK.dtype)

    def _exclusive_macs(self) -> float:
        return 0.0 if self.options.exclusive == "none" else 2.0 * self.num_heads * self.head_dim

    def mix_macs(self, num_tokens: int) -> float:
        heads, dim = self.num_heads, self.head_dim
        return softmax_attention_macs(heads, dim, dim, num_tokens, self.options.window) + self._exclusive_macs()

    def nominal_mix_macs(self, num_tokens: int) -> float:
        window = num_tokens if self.options.window is None else min(self.options.window, num_tokens)
        return 2 * self.num_heads * self.head_dim * window + self._exclusive_macs()

    def decode_state_bytes(self, num_tokens: int) -> int:
        kept = num_tokens if self.options.window is None else min(self.options.window, num_tokens)
        # Keys and values in bfloat16, log f in float32.
        return kept * self.num_heads * (2 * self.head_dim * 2 + (4 if self.options.forget else 0))
