"""A set of parameters with every kind of optimizer group, and gradients that every process can repeat.

Run by file name too (see `test_optimizer.py`): nothing here imports another test module.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nexttransformer.optim.groups import ParameterGroup, partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import get_protocol

PROTOCOL = get_protocol("test-v1")
NUM_UPDATES = 20


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    tag: str
    units: int = 1


SPECS = {
    "wte": Spec((50, 16), "embedding"),
    "lm_head": Spec((50, 16), "head"),
    "value_embeds.0": Spec((50, 16), "value_embedding"),
    "value_embeds.1": Spec((50, 16), "value_embedding"),
    "lambdas": Spec((3,), "lambda"),
    "x0": Spec((3,), "x0_lambda"),
    "backout": Spec((), "smear_backout"),
    "conv": Spec((16, 1, 4), "small"),
    "coefficients": Spec((5, 7), "coefficient"),
    "gate": Spec((2, 12), "matrix_parity"),
    "experts": Spec((3, 24, 16), "matrix", units=3),
    **{f"h.{i}.attn": Spec((16, 16), "matrix") for i in range(4)},
    **{f"h.{i}.up": Spec((64, 16), "matrix") for i in range(3)},
    **{f"h.{i}.down": Spec((16, 64), "matrix") for i in range(2)},
}


def seeded(name: str, shape: tuple[int, ...], number: int) -> Tensor:
    seed = sum(map(ord, name)) * 1000 + number
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(16)


def make_parameters(device: str = "cpu") -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(seeded(name, spec.shape, 0).to(device)) for name, spec in SPECS.items()}


def make_groups() -> list[ParameterGroup]:
    return partition_parameters(SPECS, PROTOCOL)


def make_optimizer(parameters: dict[str, nn.Parameter], **ranks) -> Optimizer:
    return Optimizer(parameters, make_groups(), PROTOCOL, num_updates=NUM_UPDATES, **ranks)


def gradient(name: str, update: int) -> Tensor:
    # As at the protocol's own start, some matrices have no gradient at first.
    return seeded(name, SPECS[name].shape, 1 + update) * (0 if update == 0 and "attn" in name else 1)


def run_updates(optimizer: Optimizer, parameters: dict[str, nn.Parameter], start: int, stop: int) -> None:
    for update in range(start, stop):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, update).to(parameter.device)
        optimizer.step(update)
