"""What behaviour checks run on: a randomized tiny model with its outputs, and how outputs are compared."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nexttransformer.config import ModelConfig
from nexttransformer.models import Decoder


@dataclass(frozen=True)
class Subject:
    """A randomized tiny model, two rows of ids and their outputs: logits, and the output of each mixer and MLP."""

    config: ModelConfig
    model: Decoder
    ids_BT: Tensor
    logits_BTV: Tensor
    traces: list[Tensor]


@contextmanager
def watched(model: Decoder) -> Iterator[list[Tensor]]:
    """Gives a list that fills with the outputs of mixer and MLP of each layer, in order, while the model runs."""
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [part.register_forward_hook(keep) for block in model.blocks for part in (block.attn, block.mlp)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def traced(model: Decoder, ids_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns logits and the watched outputs."""
    with watched(model) as outputs:
        return model(ids_BT), outputs


def largest(first: Tensor, second: Tensor) -> float:
    """Returns the largest absolute difference; infinite if it is not a number."""
    difference = (first.float() - second.float()).abs().max().item() if first.numel() else 0.0
    return difference if math.isfinite(difference) else math.inf
