"""Budget rules B1 to B4: training FLOPs per token, MLP width and depth, lookup and matmul parameters.

References are the plain Transformer's figures under the same protocol.
"""

from dataclasses import dataclass

from nexttransformer.checking.findings import Finding
from nexttransformer.config import ModelConfig
from nexttransformer.models.budget import Budget, matched_mlp_width, reference_budget
from nexttransformer.protocol import FORMAL_V1, Protocol

# Rule B2: the depth is the protocol's. Methods that are published with another one, and by how many layers.
PUBLISHED_DEPTH_OFFSETS = {"sssl": 1}
# Sizes that no method may change.
_FIXED = (
    "width",
    "num_heads",
    "head_dim",
    "context_tokens",
    "vocab_size",
    "rope_base",
    "qk_gain",
    "logit_soft_cap",
)


@dataclass(frozen=True)
class Track:
    """Where a method is ranked: "main", or the tags that rules B3 and B4 give it.

    Attributes:
        name: "main", "loop/shared", "sparse", "memory", or two joined by " + ".
        notes: why it is not the main track.
    """

    name: str
    notes: list[Finding]


def deviation(budget: Budget, protocol: Protocol) -> float:
    """Returns F/F_ref - 1."""
    return budget.training_flops_per_token / reference_budget(protocol).training_flops_per_token - 1


def budget_findings(config: ModelConfig, budget: Budget, protocol: Protocol) -> list[Finding]:
    """Checks sizes, depth and MLP width of a configuration and its training FLOPs per token."""
    findings = [
        Finding(
            "B2", f"{name} is {getattr(config, name):g}, {protocol.id} fixes {getattr(protocol, name):g}. Restore it."
        )
        for name in _FIXED
        if getattr(config, name) != getattr(protocol, name)
    ]
    offset = config.num_layers - protocol.num_layers
    if offset != PUBLISHED_DEPTH_OFFSETS.get(config.method, 0):
        expected = protocol.num_layers + PUBLISHED_DEPTH_OFFSETS.get(config.method, 0)
        findings.append(
            Finding(
                "B2",
                f"{config.num_layers} layers, expected {expected}. Remove 'schedule.depth_offset'; only methods "
                f"published with another depth are listed in checking/budget_rules.py.",
            )
        )
    width = matched_mlp_width(config, protocol)
    at_width = _deviation_at(config, budget, protocol, width)
    is_matched = abs(at_width) <= protocol.budget_tolerance
    cure = (
        f"Set 'mlp.width' to {width} ({at_width:+.2%})." if is_matched else "No MLP width meets it: make parts cheaper."
    )
    own = deviation(budget, protocol)
    if abs(own) > protocol.budget_tolerance:
        reference = reference_budget(protocol).training_flops_per_token
        findings.append(
            Finding(
                "B1",
                f"{budget.training_flops_per_token:,.0f} training FLOPs per token, {own:+.2%} of the reference "
                f"{reference:,.0f}; allowed are {protocol.budget_tolerance:.1%}. {cure}",
            )
        )
    if config.mlp_width != width:
        findings.append(
            Finding(
                "B2",
                f"MLP width {config.mlp_width}, the rule gives {width}: {protocol.mlp_width}, or if that fails B1 the "
                f"multiple of {protocol.mlp_width_step} nearest to equal FLOPs. {cure}",
            )
        )
    return findings


def _deviation_at(config: ModelConfig, budget: Budget, protocol: Protocol, width: int) -> float:
    macs = budget.macs_per_token + 2 * config.width * config.num_layers * (width - config.mlp_width)
    return macs / reference_budget(protocol).macs_per_token - 1


def find_track(budget: Budget, protocol: Protocol) -> Track:
    """Applies B3 and B4, which say where a method is ranked and refuse nothing."""
    reference = reference_budget(protocol)
    low, high = protocol.matmul_ratio_range
    ranked = "Ranked in track" if protocol.id == FORMAL_V1.id else "Only formal-v1 ranks; here it would be track"
    ratio = budget.num_matmul / reference.num_matmul
    names, notes = [], []
    if not low <= ratio <= high:
        names.append("loop/shared" if ratio < low else "sparse")
        notes.append(
            Finding(
                "B4",
                f"{budget.num_matmul:,} matmul parameters, {ratio:.3f} of the reference {reference.num_matmul:,}; "
                f"the main track takes {low:.2f} to {high:.2f}. {ranked} '{names[-1]}'.",
                is_refusal=False,
            )
        )
    limit = reference.num_lookup * (1 + protocol.lookup_tolerance)
    if budget.num_lookup > limit:
        names.append("memory")
        notes.append(
            Finding(
                "B3",
                f"{budget.num_lookup:,} lookup parameters, the main track takes at most {limit:,.0f}. "
                f"{ranked} 'memory'.",
                is_refusal=False,
            )
        )
    return Track(" + ".join(names) or "main", notes)
