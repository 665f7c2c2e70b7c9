"""Decoder state: what lets a sequence be fed in parts. A pytree of tensors with the batch first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class DecoderState:
    """State after `num_tokens` tokens.

    Attributes:
        num_tokens: tokens consumed so far.
        embedding: the last normalized, un-smeared embedding [B, 1, D] (the smear's input).
        mixers: one state per layer, as its mixer returned it.
    """

    num_tokens: int
    embedding: Tensor
    mixers: tuple[Any, ...]


def map_state(fn: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Applies `fn` to every tensor of a state; used to repeat or select rows of the batch."""
    if isinstance(state, Tensor):
        return fn(state)
    if isinstance(state, DecoderState):
        return DecoderState(state.num_tokens, fn(state.embedding), map_state(fn, state.mixers))
    if isinstance(state, tuple):
        mapped = [map_state(fn, item) for item in state]
        return type(state)(*mapped) if hasattr(state, "_fields") else tuple(mapped)
    if isinstance(state, dict):
        return {key: map_state(fn, item) for key, item in state.items()}
    return state
