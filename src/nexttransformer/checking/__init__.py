"""Checks of a method: budget rules, counted weights, and behaviour of a tiny copy, all on a CPU in seconds."""

from nexttransformer.checking.behaviour import check_behaviour
from nexttransformer.checking.findings import Finding
from nexttransformer.checking.structure import check_config, require_config

__all__ = ["Finding", "check_behaviour", "check_config", "require_config"]
