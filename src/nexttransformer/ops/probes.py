"""What the kernel self-check runs for each fused operation: inputs at the shapes in use, fast paths and reference.

A new fused operation adds one probe here. Inputs are seeded; q, k, v and upstream gradients are rounded to the
compute dtype before both sides see them. References run in float64, where no TF32 setting can touch them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nexttransformer.ops.attention import attention, plan_attention
from nexttransformer.ops.attention.naive import attention_naive
from nexttransformer.ops.decay import draw_rate_log, draw_step_bias, log_decay
from nexttransformer.ops.gated_delta_rule.naive import gated_delta_rule_chunk
from nexttransformer.ops.kimi_delta_attention.naive import kimi_delta_attention_chunk

# Largest RMS(error) / RMS(reference) of each tensor. The known miscompilation misses these by two orders.
OUTPUT_LIMITS = {"o": 0.005, "final_state": 0.005, "squares": 0.005}
GRADIENT_LIMITS = {
    **dict.fromkeys(("q", "k", "v", "initial_state", "qkv", "row", "x", "w1", "w2", "h", "w"), 0.01),
    **dict.fromkeys(("streams", "y", "x0", "logits", "table"), 0.01),
    **dict.fromkeys(("g", "beta", "log_f", "factor", "taps", "res", "post", "lambda", "mu"), 0.02),
}

Inputs = dict[str, Tensor]
Outputs = dict[str, Tensor]


class Sizes(NamedTuple):
    """Shapes in use: heads, key and value dim per head, context in tokens, and widths.

    `window` is attention's (None: full); `num_streams` is that of the residual scheme (None: not given).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    num_tokens: int
    mlp_width: int
    vocab_size: int
    window: int | None = None
    num_streams: int | None = None


class Case(NamedTuple):
    """One comparison: length, whether decays are strong, whether a state goes in and comes out."""

    name: str
    num_tokens: int
    is_strong: bool = False
    has_state: bool = False


@dataclass(frozen=True)
class Probe:
    """How to check one operation.

    Attributes:
        op: folder name in `ops/`.
        entry_points: path -> fla-core entry point that serves it (None: no fla-core), best path first.
        run: path -> (inputs, sizes) -> outputs; inputs require gradients.
        reference: the same on float64 inputs.
        make_inputs: (sizes, case, generator) -> float32 CPU inputs.
        has_state: whether it takes and gives a recurrent state.
        rounded: inputs given in the compute dtype; the others stay float32.
    """

    op: str
    entry_points: Mapping[str, str | None]
    run: Mapping[str, Callable[[Inputs, Sizes], Outputs]]
    reference: Callable[[Inputs, Sizes], Outputs]
    make_inputs: Callable[[Sizes, Case, torch.Generator], Inputs]
    has_state: bool
    rounded: tuple[str, ...] = ("q", "k", "v")

    def cases(self, sizes: Sizes) -> list[Case]:
        """Returns the comparisons: the context as in training, and a length that is not whole chunks."""
        odd = max(1, sizes.num_tokens // 2 - 24)
        if not self.has_state:
            return [Case("context", sizes.num_tokens), Case("odd_length", odd)]
        return [
            Case("context", sizes.num_tokens),
            Case("odd_length_state", odd, has_state=True),
            Case("strong_decay", odd, is_strong=True, has_state=True),
        ]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _delta_inputs(sizes: Sizes, case: Case, generator: torch.Generator, *, per_channel: bool) -> Inputs:
    rows, tokens, heads = 1, case.num_tokens, sizes.num_heads
    q, k = (functional.normalize(_normal(generator, rows, tokens, heads, sizes.key_dim), dim=-1) for _ in range(2))
    v = _normal(generator, rows, tokens, heads, sizes.value_dim)
    channels = (sizes.key_dim,) if per_channel else ()
    z = _normal(generator, rows, tokens, heads, *channels)
    rate_log = draw_rate_log(1.0 if per_channel else 0.0, 16.0, (heads,), generator)
    step_bias = draw_step_bias((heads, *channels), generator)
    g = log_decay(z, rate_log[:, None] if per_channel else rate_log, step_bias)
    if case.is_strong:
        g = -5 * torch.rand(g.shape, generator=generator)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": torch.sigmoid(_normal(generator, rows, tokens, heads))}
    if case.has_state:
        inputs["initial_state"] = _normal(generator, rows, heads, sizes.key_dim, sizes.value_dim)
    return inputs


def _run_delta(function: Callable, inputs: Inputs) -> Outputs:
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    initial = inputs.get("initial_state")
    o, state = function(*arguments, initial, initial is not None)
    return {"o": o} if initial is None else {"o": o, "final_state": state}


def _gated_delta_rule_probe() -> Probe:
    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        return _delta_inputs(sizes, case, generator, per_channel=False)

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return _run_delta(lambda *a: gated_delta_rule_chunk(*a[:5], initial_state_BHKV=a[5]), x)

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.gated_delta_rule import fused

        return _run_delta(fused.run_fla, x)

    def broadcast(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.gated_delta_rule import fused

        return _run_delta(fused.run_kda_broadcast, x)

    points = {"fla": "chunk_gated_delta_rule", "kda_broadcast": "chunk_kda"}
    runs = {"fla": native, "kda_broadcast": broadcast}
    return Probe("gated_delta_rule", points, runs, reference, inputs, True)


def _kimi_delta_attention_probe() -> Probe:
    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        return _delta_inputs(sizes, case, generator, per_channel=True)

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return _run_delta(lambda *a: kimi_delta_attention_chunk(*a[:5], initial_state_BHKV=a[5]), x)

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.kimi_delta_attention import fused

        return _run_delta(fused.run_fla, x)

    return Probe("kimi_delta_attention", {"fla": "chunk_kda"}, {"fla": native}, reference, inputs, True)


def _attention_inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
    shape, value_shape = ((1, case.num_tokens, sizes.num_heads, d) for d in (sizes.key_dim, sizes.value_dim))
    # QK norm makes every key and query 1.2 sqrt(K) long.
    q, k = (1.2 * sizes.key_dim**0.5 * functional.normalize(_normal(generator, *shape), dim=-1) for _ in range(2))
    return {"q": q, "k": k, "v": _normal(generator, *value_shape)}


def _attention_probe() -> Probe:
    def native(x: Inputs, sizes: Sizes) -> Outputs:
        plan = plan_attention(x["q"].shape[1], sizes.window, x["q"].device)
        # flex_attention is taken inside a compiled region only.
        run = torch.compile(attention, dynamic=False) if plan.backend == "flex" else attention
        return {"o": run(x["q"], x["k"], x["v"], window=sizes.window, plan=plan)}

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        with sdpa_kernel(SDPBackend.MATH):
            return {"o": attention_naive(x["q"], x["k"], x["v"], window=sizes.window)}

    return Probe("attention", {"native": None}, {"native": native}, reference, _attention_inputs, False)


def _forgetting_attention_probe() -> Probe:
    from nexttransformer.ops.forgetting_attention.naive import forgetting_attention_naive

    def inputs(sizes: Sizes, case: Case, generator: torch.Generator) -> Inputs:
        gates = _normal(generator, 1, case.num_tokens, sizes.num_heads) + torch.linspace(4.0, 8.0, sizes.num_heads)
        return _attention_inputs(sizes, case, generator) | {"log_f": functional.logsigmoid(gates)}

    def native(x: Inputs, sizes: Sizes) -> Outputs:
        from nexttransformer.ops.forgetting_attention import fused

        return {"o": fused.run_fla(x["q"], x["k"], x["v"], x["log_f"], sizes.window)}

    def reference(x: Inputs, sizes: Sizes) -> Outputs:
        return {"o": forgetting_attention_naive(x["q"], x["k"], x["v"], x["log_f"], window=sizes.window)}

    points = {"fla": "parallel_forgetting_attn"}
    return Probe("forgetting_attention", points, {"fla": native}, reference, inputs, False)


_PROBES: dict[str, Callable[[], Probe]] = {
    "attention": _attention_probe,
    "forgetting_attention": _forgetting_attention_probe,
    "gated_delta_rule": _gated_delta_rule_probe,
    "kimi_delta_attention": _kimi_delta_attention_probe,
}


def _skeleton_probe(name: str) -> Callable[[], Probe]:
    def make() -> Probe:
        from nexttransformer.ops import skeleton_probes

        return getattr(skeleton_probes, f"{name}_probe")()

    return make


_AROUND_MIXING = (
    *("rotary_heads", "convolved_heads", "relu_squared", "cross_entropy"),
    *("stream_write", "sinkhorn", "lookup_gradient"),
)
_PROBES |= {name: _skeleton_probe(name) for name in _AROUND_MIXING}


def probe_names() -> list[str]:
    """Returns the operations that can be checked."""
    return sorted(_PROBES)


def get_probe(op: str) -> Probe:
    """Returns the probe of an operation; an operation without one is a part's bug."""
    assert op in _PROBES, f"fused operation '{op}' has no probe in ops/probes.py"
    return _PROBES[op]()
