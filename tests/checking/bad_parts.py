"""Deliberately bad mixers and residual schemes, each wrong in one way. Registered by `register` in tests only."""

from typing import Any

import torch
from torch import Tensor, nn

from nexttransformer import registry
from nexttransformer.models.layers import Linear, projection_bound
from nexttransformer.models.mixers.attention import Attention
from nexttransformer.models.parts import constant, uniform
from nexttransformer.models.residuals.plain import Plain


def register(monkeypatch: Any) -> None:
    """Adds every bad part to the registry under its class name in lower case, until the test ends."""
    for slot, base, table in (("mixer", Attention, registry.MIXERS), ("residual", Plain, registry.RESIDUALS)):
        for name, kind in list(globals().items()):
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
                assert name.lower() not in registry.part_names(slot)
                monkeypatch.setitem(table, name.lower(), f"{__name__}:{name}")


class _Changed(Attention):
    """Attention whose output a subclass changes."""

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        y_BTD, state = super().forward(x, *args, **kwargs)
        return self.change(y_BTD, x.query), state


class FutureLeak(_Changed):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD + 1e-3 * y_BTD.mean(1, keepdim=True)


class LateLeak(_Changed):
    """Leaks only after 500 updates."""

    is_update_dependent = True
    update = 0

    def set_step(self, update: int) -> None:
        self.update = update

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD + y_BTD.roll(-1, 1) if self.update > 500 else y_BTD


class RowMixing(_Changed):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD - y_BTD.mean(0, keepdim=True)


class LengthDependent(_Changed):
    """Divides by the length: neither prefixes nor parts agree with the whole."""

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD / y_BTD.shape[1]


class Forgetful(_Changed):
    """Its state lacks the newest token's key."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        y_BTD, state = super().forward(x, *args, **kwargs)
        if state is not None:
            state = state._replace(k_BSHK=torch.cat([state.k_BSHK[:, :-1], 0 * state.k_BSHK[:, -1:]], 1))
        return y_BTD, state


class Stateless(_Changed):
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x, *args, **kwargs)[0], None


class Dropping(_Changed):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        # Below the rounding that the other checks allow.
        return y_BTD + 1e-6 * torch.rand((), dtype=y_BTD.dtype)


class Loud(Attention):
    """Starts with an output, at three times the usual size."""

    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        bound = 3 * projection_bound(config.width)
        self.c_proj = Linear(config.width, config.width, tag="matrix", init=uniform(-bound, bound))


class WrongBytes(Attention):
    def decode_state_bytes(self, num_tokens: int) -> int:
        return super().decode_state_bytes(num_tokens) // 2


class Broken(_Changed):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD @ y_BTD


class _WithParameter(_Changed):
    """Attention with one more vector."""

    tag = "small"

    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        self.declare("gain", (config.width,), tag=self.tag, init=constant(1.0))

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD * self.gain.to(y_BTD.dtype)


class Float32Output(_WithParameter):
    """Multiplies by a float32 vector, which makes the output float32."""

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD * self.gain


class DeadParameter(_WithParameter):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD


class HalfDead(_WithParameter):
    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        half = self.gain.shape[0] // 2
        gain = self.gain.to(y_BTD.dtype)
        return torch.cat([y_BTD[..., :half] * gain[:half], y_BTD[..., half:]], dim=-1)


class FastGain(_WithParameter):
    """Takes the learning rate of x0's lambdas for its own parameter."""

    tag = "x0_lambda"


class MuonGain(_WithParameter):
    """A vector for Muon."""

    tag = "matrix"


class Undeclared(_Changed):
    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        self.scale = nn.Parameter(torch.ones(config.width))

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD * self.scale.to(y_BTD.dtype)


class Buffered(Attention):
    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        self.register_buffer("average", torch.zeros(config.width))


class Reused(_Changed):
    """Runs its output projection twice and declares it once."""

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD + self.c_proj(y_BTD)


class HiddenWeight(_Changed):
    """A whole matrix that the budget does not see."""

    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        bound = projection_bound(config.width)
        self.declare("hidden", (config.width, config.width), tag="matrix", init=uniform(-bound, bound))

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD + y_BTD @ self.hidden.t().to(y_BTD.dtype)


class HiddenMixing(Attention):
    """Attention that declares the cost of none."""

    def mix_macs(self, num_tokens: int) -> float:
        return 0.0


class WrongSize(_Changed):
    """A square gate for AdamW."""

    def __init__(self, config: Any, layer: int, options: Any, *, has_value_row: bool) -> None:
        super().__init__(config, layer, options, has_value_row=has_value_row)
        bound = projection_bound(config.width)
        self.mixed = Linear(config.width, config.width, tag="small", init=uniform(-bound, bound))

    def change(self, y_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return y_BTD * torch.sigmoid(self.mixed(x_BTD))


class HiddenSum(Plain):
    """A residual scheme with a matrix of its own and no declared cost."""

    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, options)
        bound = projection_bound(config.width)
        self.declare("mixer", (config.width, config.width), tag="coefficient", init=uniform(-bound, bound))

    def write(self, state: Tensor, sublayer: int, y_BTD: Tensor, context: Any) -> Tensor:
        return state + y_BTD + torch.nn.functional.linear(y_BTD, self.mixer.to(y_BTD.dtype))


class LeakySum(Plain):
    def write(self, state: Tensor, sublayer: int, y_BTD: Tensor, context: Any) -> Tensor:
        return state + y_BTD + y_BTD.mean(1, keepdim=True)
