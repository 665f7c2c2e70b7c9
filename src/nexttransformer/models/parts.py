"""The interfaces of parts: what a mixer and a residual scheme must provide, and how parameters are declared.

A part declares every parameter once, with its optimizer tag and its initial distribution. Optimizer
groups, initialization, budget, checkpoints, audit and export read only these declarations.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from nexttransformer.config import ModelConfig
from nexttransformer.ops.backends import chosen_path

TAGS = frozenset(
    (
        *("matrix", "matrix_parity", "low_rank", "head", "embedding", "value_embedding"),
        *("lambda", "x0_lambda", "smear_backout", "small", "coefficient"),
    )
)

# Draws the initial values of one tensor: (shape, generator) -> float32 CPU tensor.
Init = Callable[[tuple[int, ...], torch.Generator], Tensor]


def zeros() -> Init:
    """Initializes with zeros."""
    return lambda shape, generator: torch.zeros(shape)


def constant(value: float) -> Init:
    """Initializes with one value."""
    return lambda shape, generator: torch.full(shape, value)


def values(tensor: Tensor) -> Init:
    """Initializes with given values (float32, same shape)."""
    return lambda shape, generator: tensor.to(torch.float32).reshape(shape).clone()


def uniform(low: float, high: float) -> Init:
    """Initializes from the uniform distribution on [low, high)."""
    return lambda shape, generator: torch.empty(shape).uniform_(low, high, generator=generator)


def normal(std: float) -> Init:
    """Initializes from N(0, std^2)."""
    return lambda shape, generator: torch.empty(shape).normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class ParameterSpec:
    """Declaration of one parameter.

    Attributes:
        shape: stored shape; matrices are (out, in).
        tag: optimizer tag, one of TAGS.
        init: initial distribution.
        units: independent Muon units stacked in the first dimension of a 3-D tensor, else 1.
    """

    shape: tuple[int, ...]
    tag: str
    init: Init
    units: int = 1


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """Returns a CPU generator seeded by the first 8 bytes (little-endian) of SHA-256 of "seed:name"."""
    value = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    generator = torch.Generator(device="cpu")
    # torch takes seeds in the signed 64-bit range; the bit pattern is kept.
    generator.manual_seed(value - 2**64 if value >= 2**63 else value)
    return generator


class Part(nn.Module):
    """A module whose own parameters are declared with tag and initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, ParameterSpec] = {}

    if TYPE_CHECKING:
        # Declared parameters are attributes set by name; torch types such access as Tensor or Module.
        def __getattr__(self, name: str) -> Any: ...

    def declare(self, name: str, shape: tuple[int, ...], *, tag: str, init: Init) -> None:
        """Creates the float32 parameter `name` of this module, uninitialized.

        Raises:
            ValueError: if the tag is unknown (a part's bug).
        """
        if tag not in TAGS:
            raise ValueError(f"{type(self).__name__}.{name}: unknown tag '{tag}', expected one of {sorted(TAGS)}")
        self.declarations[name] = ParameterSpec(tuple(shape), tag, init)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))

    def token_macs(self) -> float:
        """Multiply-adds per token of this module's own weights; 0 unless it multiplies the token stream."""
        return 0.0


class PartOptions(BaseModel):
    """Base of a part's options: strict, immutable; the class's fields are the accepted keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# The name parts import; classes carry their own as the attribute `Options`.
Options = PartOptions


class MixerInput(NamedTuple):
    """Normalized inputs of a mixer, [B, T, D] each; one tensor three times unless the residual scheme splits roles.

    q and output gates read `query`; k, decay, erase, write and forget gates read `key`; v and the
    value-embedding gate read `value`.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class Rope(NamedTuple):
    """Rotary table of the positions at hand: cos and sin, [T, K/2], compute dtype."""

    cos: Tensor
    sin: Tensor


MixerState = Any


class Mixer(Part):
    """Sequence mixing of one layer: normalized input -> output for the residual scheme.

    A mixer owns its projections, value-embedding gate, convolutions and norms, and reads nothing of
    the document structure. Class attributes describe it; subclasses set `Options`.
    """

    Options: type[PartOptions] = PartOptions
    uses_rope = False
    is_update_dependent = False
    # Names of the fused operations it may use on CUDA (folders of `ops/`).
    fused_ops: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, layer: int, *, has_value_row: bool) -> None:
        super().__init__()
        self.layer = layer
        self.has_value_row = has_value_row
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim

    @classmethod
    def fused_ops_of(cls, options: dict[str, Any]) -> tuple[str, ...]:
        """Returns the fused operations a layer with these options (spelled out) may use on CUDA."""
        return cls.fused_ops

    def forward(
        self,
        x: MixerInput,
        value_row_BTD: Tensor | None,
        rope: Rope,
        *,
        state: MixerState | None = None,
        want_state: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """Mixes along the sequence.

        Args:
            x: normalized inputs.
            value_row_BTD: raw value-embedding rows of the tokens, or None on layers without a table.
            rope: table for these positions.
            state: what an earlier part of the sequence left, or None at its start. A pytree of
                tensors with the batch first.
            want_state: whether to return the state after the last token.

        Returns:
            Output [B, T, D] in the compute dtype, and the new state or None.
        """
        raise TypeError(f"{type(self).__name__} must define forward")

    def prepare(self, num_tokens: int, device: torch.device) -> None:
        """Builds what a fast path needs for this context (masks, tables) before compilation; nothing by default."""

    def backend(self) -> str:
        """Returns which implementations run on CUDA, for the run's header."""
        return ", ".join(f"{op} {chosen_path(op) or 'not chosen'}" for op in self.fused_ops)

    def mix_macs(self, num_tokens: int) -> float:
        """Parameter-free sequence-mixing multiply-adds per token at context `num_tokens` (budget formulas)."""
        raise TypeError(f"{type(self).__name__} must define mix_macs")

    def nominal_mix_macs(self, num_tokens: int) -> float:
        """`mix_macs` by the nominal convention that charges every key of a window; equal unless overridden."""
        return self.mix_macs(num_tokens)

    def decode_state_bytes(self, num_tokens: int) -> int:
        """Bytes one row's state takes on a GPU after `num_tokens` tokens."""
        raise TypeError(f"{type(self).__name__} must define decode_state_bytes")


class ResidualRead(NamedTuple):
    """What a sublayer reads: role inputs [B, T, D] before normalization, and the scheme's own context for `write`."""

    query: Tensor
    key: Tensor
    value: Tensor
    context: Any = None


ResidualState = Any


class Residual(Part):
    """How sublayers read from and write to the residual stream(s).

    Sublayer 2l is the mixer of layer l, 2l+1 its MLP.
    """

    Options: type[PartOptions] = PartOptions
    is_update_dependent = False
    # Names of the fused operations it may use on CUDA (folders of `ops/`).
    fused_ops: tuple[str, ...] = ()
    # Whether the skeleton creates lambda, mu and backout for this scheme.
    keeps_skeleton_scalars = True
    num_streams = 1

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_sublayers = 2 * config.num_layers

    def init(self, x0_BTD: Tensor) -> ResidualState:
        """Returns the state before layer 0."""
        raise TypeError(f"{type(self).__name__} must define init")

    def scale(self, state: ResidualState, lambda_: Tensor, mu: Tensor, x0_BTD: Tensor) -> ResidualState:
        """Returns every stream as lambda*x + mu*x0 (0-d float32 scalars); not called where scalars are replaced."""
        raise TypeError(f"{type(self).__name__} must define scale")

    def read(self, state: ResidualState, sublayer: int) -> ResidualRead:
        """Returns the sublayer's input; the skeleton normalizes it."""
        raise TypeError(f"{type(self).__name__} must define read")

    def write(self, state: ResidualState, sublayer: int, y_BTD: Tensor, context: Any) -> ResidualState:
        """Returns the state after the sublayer's output y."""
        raise TypeError(f"{type(self).__name__} must define write")

    def collapse(self, state: ResidualState) -> Tensor:
        """Returns one stream [B, T, D] from the state; also used for the middle stream of backout."""
        raise TypeError(f"{type(self).__name__} must define collapse")

    def finish(self, state: ResidualState) -> Tensor:
        """Returns the stream [B, T, D] that goes to the head."""
        return self.collapse(state)

    def extra_macs(self) -> float:
        """Multiply-adds per token beyond the declared Linear weights (stream mixing)."""
        return 0.0

    def unreached(self) -> dict[str, list[int]]:
        """Parameters that get no gradient by design: name below this module -> indices of the first dimension.

        The gradient check takes these and no others as exceptions.
        """
        return {}
