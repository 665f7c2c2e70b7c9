"""The one place that imports fla-core, and the switch of its guard against miscompiled gradients.

fla-core reads FLA_DISABLE_BACKEND_DISPATCH once, at its first import: with 1 every function is its plain Triton
form, without a search of other backends per call. It is set here unless the user set it.
"""

import importlib
import logging
import sys
from types import ModuleType

from nexttransformer.ops import backends

_log = logging.getLogger(__name__)
_GUARD_MODULE = "fla.ops.common.chunk_o"
# The guard of that module raises while this constant is False (on Hopper, with an affected Triton).
_GUARD_CONSTANT = "TRITON_ABOVE_3_7_1"
_guard_values: list[bool] = []


def load(module: str) -> ModuleType:
    """Imports a module of fla-core.

    Raises:
        ImportError: if it is absent, or lacks a package it needs.
    """
    if "fla" not in sys.modules:
        setting = backends.dispatch_setting()
        _log.info("importing fla-core %s, %s=%s", backends.installed("fla-core"), backends.DISPATCH_VARIABLE, setting)
    return importlib.import_module(module)


def set_guard_bypassed(is_bypassed: bool) -> None:
    """Switches fla-core's guard of the gated backward off or back on, for this process.

    The only caller that leaves it off is the self-check, after the native kernel passed on every rank of a
    smoke or open run; formal runs never run with it off.
    """
    if is_bypassed == is_guard_bypassed():
        return
    module = load(_GUARD_MODULE)
    if is_bypassed:
        _guard_values.append(getattr(module, _GUARD_CONSTANT))
        setattr(module, _GUARD_CONSTANT, True)
    else:
        setattr(module, _GUARD_CONSTANT, _guard_values.pop())


def is_guard_bypassed() -> bool:
    """Returns whether the guard is switched off in this process."""
    return bool(_guard_values)
