"""A stand-in for Triton's autotuner and a package `fla` with three tuned kernels, on a machine that has neither.

The decision of `Autotuner.run` is that of `triton/runtime/autotuner.py`; what it would measure is a table here.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class Config:
    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.num_ctas, self.maxnreg, self.pre_hook = 1, None, None


class KernelInterface:
    fn: Any = None


class Autotuner(KernelInterface):
    def __init__(self, name: str, keys: list[str], configs: list[Config], module: str = "fla.ops.demo") -> None:
        self.base_fn = SimpleNamespace(__module__=module, __qualname__=name)
        self.keys, self.configs, self.cache = keys, configs, {}
        self.fastest = configs[0]
        self.num_measured = 0

    def run(self, **arguments: Any) -> Config:
        if len(self.configs) == 1:
            return self.configs[0]
        key = [arguments[name] for name in self.keys if name in arguments]
        key += [value for value in arguments.values() if str(value).startswith("torch.")]
        if tuple(key) not in self.cache:
            self.num_measured += 1
            self.cache[tuple(key)] = self.fastest
        return self.cache[tuple(key)]


class Heuristics(KernelInterface):
    def __init__(self, fn: Any) -> None:
        self.fn = fn


class Kernels:
    """The kernels of the stand-in: two with a choice, one behind a decorator, and one without."""

    def __init__(self) -> None:
        self.sums = Autotuner("sums", ["B", "H"], [Config({}, warps) for warps in (1, 2, 4)])
        self.states = Autotuner(
            "states", ["H", "K", "USE_G"], [Config({"BK": 64, "BV": size}, 4, 2) for size in (32, 64)], "fla.ops.common"
        )
        self.only = Autotuner("only", ["H"], [Config({"BV": 16})])

    def modules(self) -> dict[str, ModuleType]:
        """Returns what `sys.modules` gets."""
        contents: dict[str, dict[str, Any]] = {
            "triton": {},
            "triton.runtime": {},
            "triton.runtime.autotuner": {"Autotuner": Autotuner},
            "triton.runtime.jit": {"KernelInterface": KernelInterface},
            "fla": {},
            "fla.ops": {"sums": self.sums},
            "fla.ops.demo": {"sums": self.sums, "only": self.only, "text": "x"},
            "fla.ops.common": {"states": Heuristics(Heuristics(self.states))},
        }
        modules = {}
        for name, content in contents.items():
            modules[name] = ModuleType(name)
            vars(modules[name]).update(content)
        return modules

    def install(self, monkeypatch: Any) -> None:
        """Replaces triton and fla for a test."""
        for name in [name for name in sys.modules if name.split(".")[0] in ("fla", "triton")]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in self.modules().items():
            monkeypatch.setitem(sys.modules, name, module)

    def exercise(self, num_rows: int = 8) -> None:
        """What one operation runs forward and backward, first without and then with a recurrent state."""
        for states in ((), ("torch.float32",)):
            types = {f"x{index}": name for index, name in enumerate(("torch.bfloat16", "torch.float32", *states))}
            self.sums.run(B=num_rows, H=2, **types)
            self.states.run(H=2, K=16, USE_G=True, **types)
        self.only.run(H=2)

    @property
    def num_measured(self) -> int:
        """Returns how many keys were measured."""
        return self.sums.num_measured + self.states.num_measured + self.only.num_measured
