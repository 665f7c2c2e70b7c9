"""Lazy registry: a part's name -> the class that implements it, imported on first use."""

import importlib
from typing import Any

from nexttransformer.errors import ConfigError, suggest

# A new part is one new file and one line here. Targets are "module:class".
MIXERS = {
    "attention": "nexttransformer.models.mixers.attention:Attention",
    "gdn": "nexttransformer.models.mixers.gated_deltanet:GatedDeltaNet",
    "kda": "nexttransformer.models.mixers.kimi_delta_attention:KimiDeltaAttention",
}
RESIDUALS = {
    "plain": "nexttransformer.models.residuals.plain:Plain",
    "hc": "nexttransformer.models.residuals.hyper_connections:HyperConnections",
    "mhc": "nexttransformer.models.residuals.manifold_hyper_connections:ManifoldHyperConnections",
    "mhc_lite": "nexttransformer.models.residuals.manifold_hyper_connections:ManifoldHyperConnectionsLite",
    "simple_hc": "nexttransformer.models.residuals.manifold_hyper_connections:SimpleHyperConnections",
    "attnres": "nexttransformer.models.residuals.attention_residuals:AttentionResiduals",
    "mudd": "nexttransformer.models.residuals.mudd:Mudd",
    "denseformer": "nexttransformer.models.residuals.mudd:DenseFormer",
}
MLPS = {
    "relu2": "nexttransformer.models.layers:ReluSquaredMLP",
}
_SLOTS = {"mixer": MIXERS, "residual": RESIDUALS, "mlp": MLPS}


def part_names(slot: str) -> list[str]:
    """Returns the registered part names of a slot: "mixer", "residual" or "mlp"."""
    return sorted(_SLOTS[slot])


def part_module(slot: str, name: str) -> str:
    """Returns the module path that implements a part, without importing it."""
    return _SLOTS[slot][name].split(":")[0]


def load_part(slot: str, name: str, where: str = "config") -> Any:
    """Returns the class of a part.

    Args:
        slot: "mixer", "residual" or "mlp".
        name: the registered name.
        where: prefix of the error message (file and key).

    Raises:
        ConfigError: if the name is unknown; names the nearest one.
    """
    targets = _SLOTS[slot]
    if name not in targets:
        raise ConfigError(f"{where}: unknown {slot} '{name}'.{suggest(name, targets)}")
    module, _, attribute = targets[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
