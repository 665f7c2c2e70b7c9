"""Compute budget: parameters by kind, training FLOPs per token, and the MLP width that matches a method.

Weights that multiply the token stream are counted structurally from the modules; sequence mixing comes
from the formulas. Training FLOPs = 6 x multiply-adds (2 forward, 4 backward), causal-exact.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from nexttransformer.config import METHOD_SCHEMA, ModelConfig, expand, parse_method
from nexttransformer.models.layers import Lookup
from nexttransformer.models.parts import Part
from nexttransformer.protocol import Protocol

if TYPE_CHECKING:
    from nexttransformer.models.decoder import Decoder


@dataclass(frozen=True)
class Budget:
    """Sizes and costs of one model.

    Attributes:
        num_parameters: all parameters.
        num_matmul: weights that multiply the token stream.
        num_lookup: rows of embedding tables.
        macs_per_token: forward multiply-adds per token.
        training_flops_per_token: 6 x macs_per_token.
        nominal_flops_per_token: nanochat's convention, without causal halving, for MFU beside published figures.
        decode_state_bytes: state of one row after a full context.
    """

    num_parameters: int
    num_matmul: int
    num_lookup: int
    macs_per_token: float
    training_flops_per_token: float
    nominal_flops_per_token: float
    decode_state_bytes: int


def measure(model: "Decoder") -> Budget:
    """Counts a decoder (meta device suffices)."""
    num_tokens = model.config.context_tokens
    parts = [module for module in model.modules() if isinstance(module, Part)]
    lookup = sum(module.weight.numel() for module in parts if isinstance(module, Lookup))
    weights = [(module.token_macs(), sum(p.numel() for p in module.parameters(recurse=False))) for module in parts]
    matmul = sum(numel for macs, numel in weights if macs > 0)
    mixers = [block.attn for block in model.blocks]
    mix = sum(mixer.mix_macs(num_tokens) for mixer in mixers)
    macs = sum(macs for macs, _ in weights) + mix + model.residual.extra_macs()
    nominal_mix = sum(mixer.nominal_mix_macs(num_tokens) for mixer in mixers)
    return Budget(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_matmul=matmul,
        num_lookup=lookup,
        macs_per_token=macs,
        training_flops_per_token=6 * macs,
        nominal_flops_per_token=6 * (macs - mix + nominal_mix),
        decode_state_bytes=sum(mixer.decode_state_bytes(num_tokens) for mixer in mixers),
    )


def reference_config(protocol: Protocol) -> ModelConfig:
    """Returns the plain Transformer of a protocol: full attention everywhere, plain residual."""
    method = {
        "schema": METHOD_SCHEMA,
        "method": "reference",
        "family": "reference",
        "name": "Plain Transformer",
        "schedule": {"pattern": "F"},
        "mixers": {"F": {"type": "attention"}},
        "mlp": {"type": "relu2", "width": protocol.mlp_width},
        "residual": {"type": "plain"},
    }
    return expand(parse_method(method, "reference"), protocol, mlp_width=protocol.mlp_width)


def measure_config(config: ModelConfig) -> Budget:
    """Counts the model of a configuration, built without storage."""
    from nexttransformer.models import build_model

    return measure(build_model(config, "meta"))


@lru_cache(maxsize=8)
def reference_budget(protocol: Protocol) -> Budget:
    """Counts the plain Transformer of a protocol: the reference of rules B1, B3 and B4."""
    return measure_config(reference_config(protocol))


def matched_mlp_width(config: ModelConfig, protocol: Protocol) -> int:
    """Returns the MLP width rule B2 asks for.

    The protocol's own width if the method then stays within the budget tolerance, else the multiple of
    the protocol's step nearest to equal training FLOPs per token.

    Args:
        config: the method's configuration at any MLP width.
        protocol: gives the reference, the tolerance and the step.
    """
    reference = reference_budget(protocol).macs_per_token
    macs = measure_config(config).macs_per_token
    per_width = 2 * config.width * config.num_layers
    base = protocol.mlp_width
    macs_at_base = macs + per_width * (base - config.mlp_width)
    if abs(macs_at_base / reference - 1) <= protocol.budget_tolerance:
        return base
    exact = base + (reference - macs_at_base) / per_width
    step = protocol.mlp_width_step
    return max(step, step * round(exact / step))
