"""Which tiles fla-core's kernels run with: read from Triton's autotuners after they measured, put back before they do.

A kernel that has several candidate configurations measures all of them at the first call of each key and keeps the
fastest in `Autotuner.cache`. Measuring takes minutes, and two processes may find different winners, whose results
differ in the last bits. Here a choice has a shorter key than Triton's: the number of rows (argument `B` of the
cumulative sums) and how many tensors of each type a call has (with or without recurrent states) are left out. So
one choice serves self-check, training and evaluation at any micro-batch.

Triton's side is `triton/runtime/autotuner.py`, the same in 3.6.0 and 3.7.1.
"""

import sys
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from nexttransformer.errors import ConfigError
from nexttransformer.ops import fla_core

# Name of the kernels' argument that counts rows; it says nothing about the best tile.
_ROWS_ARGUMENT = "B"

Key = tuple[int | float | str | None, ...]


class Tile(NamedTuple):
    """One configuration of a kernel: its constants by name, in name order, and how it is compiled."""

    kwargs: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None


# (kernel, short key) -> tile.
Choices = dict[tuple[str, Key], Tile]


def tile_of(config: Any) -> Tile:
    """Returns what a `triton.Config` says; hooks are no part of it."""
    kwargs = tuple(sorted(config.kwargs.items()))
    maxnreg = getattr(config, "maxnreg", None)
    return Tile(kwargs, config.num_warps, config.num_stages, getattr(config, "num_ctas", 1), maxnreg)


def short_key(key: Iterable[Any]) -> Key:
    """Returns values of the key arguments, then the distinct tensor types of the call in name order."""
    values = [item if item is None or isinstance(item, (int, float)) else str(item) for item in key]
    is_type = [isinstance(value, str) and value.startswith("torch.") for value in values]
    arguments = [value for value, skip in zip(values, is_type, strict=True) if not skip]
    return (*arguments, *sorted({str(value) for value, take in zip(values, is_type, strict=True) if take}))


class TileCache(dict):
    """The cache of one autotuner: Triton's keys in front, found through short keys where they are new.

    Attributes:
        used: short key -> configuration, of every call since this cache was installed.
    """

    def __init__(self, kernel: str, stored: dict[Key, Any], *, is_final: bool) -> None:
        """Starts with the stored configurations; with `is_final` a later measurement is a warning."""
        super().__init__()
        self.used: dict[Key, Any] = {}
        self._kernel, self._stored, self._is_final = kernel, dict(stored), is_final

    def __contains__(self, key: object) -> bool:
        """Whether this call is decided; Triton asks before it reads."""
        if super().__contains__(key):
            return True
        assert isinstance(key, tuple)
        short = short_key(key)
        if short not in self._stored:
            return False
        self._keep(key, short, self._stored[short])
        return True

    def __setitem__(self, key: tuple, config: Any) -> None:
        """Takes what Triton measured, or read from its own cache on disk."""
        if self._is_final:
            warnings.warn(
                f"{self._kernel}: this process chose tiles alone, after the start, for {list(key)}; they are not in "
                "the recorded tuning.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._keep(key, short_key(key), config)

    def _keep(self, key: tuple, short: Key, config: Any) -> None:
        super().__setitem__(key, config)
        self._stored[short] = self.used[short] = config


def find_autotuners() -> dict[str, Any]:
    """Returns kernel name -> Triton autotuner with a choice to make, of every loaded module of fla-core.

    fla-core's own subclass (`CachedAutotuner`) counts too; decorators around an autotuner are looked through.
    """
    # Imported here: a CPU installation has no Triton, and nothing to tune.
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    def autotuner_in(value: Any) -> Any:
        while isinstance(value, KernelInterface) and not isinstance(value, Autotuner):
            value = getattr(value, "fn", None)
        return value if isinstance(value, Autotuner) else None

    modules = [module for name, module in sys.modules.items() if name == "fla" or name.startswith("fla.")]
    values = [value for module in modules if module is not None for value in vars(module).values()]
    autotuners = [each for each in map(autotuner_in, values) if each is not None and len(each.configs) > 1]
    return {f"{each.base_fn.__module__}.{each.base_fn.__qualname__}": each for each in autotuners}


def load_kernels() -> None:
    """Imports every kernel of fla-core (about 270 modules, as any of its operations does).

    Raises:
        ImportError: if it cannot be imported.
    """
    fla_core.load("fla.ops")


def refused(choices: Choices) -> list[str]:
    """Returns one line for each choice that is none of its kernel's own candidates. Needs `load_kernels`."""
    return _match(choices, find_autotuners())[1]


def install(choices: Choices, *, is_final: bool = False) -> None:
    """Gives every autotuner these choices and no others, so that nothing is measured for them.

    Args:
        choices: what to install.
        is_final: nothing should be measured from now on: warn where a call asks for more.

    Raises:
        ConfigError: if one is none of its kernel's candidates; then nothing is installed.
    """
    autotuners = find_autotuners()
    configs, problems = _match(choices, autotuners)
    if problems:
        advice = "Give every node the same GPUs and versions, and leave FLA_CACHE_MODE unset."
        raise ConfigError(f"Kernel tuning does not fit this machine: {problems[0]} {advice}")
    for kernel, autotuner in autotuners.items():
        autotuner.keys = [name for name in autotuner.keys if name != _ROWS_ARGUMENT]
        autotuner.cache = TileCache(kernel, configs.get(kernel, {}), is_final=is_final)


def collect() -> Choices:
    """Returns the choices that calls have used since `install`, stored and measured ones."""
    return {
        (kernel, key): tile_of(config)
        for kernel, autotuner in find_autotuners().items()
        if isinstance(autotuner.cache, TileCache)
        for key, config in autotuner.cache.used.items()
    }


def _match(choices: Choices, autotuners: dict[str, Any]) -> tuple[dict[str, dict[Key, Any]], list[str]]:
    """Returns kernel -> short key -> the kernel's own candidate, and what is wrong, one line each."""
    configs: dict[str, dict[Key, Any]] = {}
    problems = []
    for (kernel, key), tile in choices.items():
        candidates = autotuners[kernel].configs if kernel in autotuners else []
        config = next((each for each in candidates if tile_of(each) == tile), None)
        if config is not None:
            configs.setdefault(kernel, {})[key] = config
        elif candidates:
            problems.append(f"{kernel}: the tile for {list(key)} is none of its {len(candidates)} candidates.")
        else:
            problems.append(f"{kernel}: no kernel of this fla-core with a choice of tiles.")
    return configs, problems
