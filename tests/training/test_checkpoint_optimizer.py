"""Saving and loading with the real model and optimizer, at one and two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nexttransformer.config import resolve_method
from nexttransformer.models import build_model
from nexttransformer.optim.groups import partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import TEST_V1
from nexttransformer.training.checkpoint import save_checkpoint
from nexttransformer.training.checkpoint_choice import choose_checkpoint
from nexttransformer.training.checkpoint_load import load_checkpoint
from nexttransformer.training.collectives import GroupCollectives, SingleProcess
from nexttransformer.training.weights_digest import weights_digest
from tests.distributed import run_ranks
from tests.training.run_helpers import CONFIG, PROTOCOL_FILE, make_record, make_state

METHOD = Path(__file__).parents[2] / "configs" / "baseline" / "dense_full.json"


def build(seed: int, rank: int = 0, world_size: int = 1) -> tuple[dict[str, Any], Optimizer, dict[str, str]]:
    model = build_model(resolve_method(METHOD, TEST_V1), seed=seed)
    groups = partition_parameters(model.parameter_specs(), TEST_V1)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, groups, TEST_V1, num_updates=20, rank=rank, world_size=world_size)
    group_of = {name: group.settings.name for group in groups for name in group.names}
    return parameters, optimizer, group_of


def train_two_updates(parameters: dict[str, Any], optimizer: Optimizer, start: int) -> None:
    for update in (start, start + 1):
        generator = torch.Generator().manual_seed(update)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(update)


def train_and_save(rank: int, world_size: int, root: str) -> str:
    collectives = GroupCollectives() if world_size > 1 else SingleProcess()
    parameters, optimizer, group_of = build(1, rank, world_size)
    train_two_updates(parameters, optimizer, 0)
    save_checkpoint(
        Path(root),
        state=make_state(2),
        model_config=CONFIG,
        protocol=PROTOCOL_FILE,
        parameters=parameters,
        optimizer=optimizer,
        group_of=group_of,
        collectives=collectives,
    )
    train_two_updates(parameters, optimizer, 2)
    return weights_digest(parameters)


def load_and_train(rank: int, world_size: int, root: str) -> str:
    collectives = GroupCollectives() if world_size > 1 else SingleProcess()
    parameters, optimizer, _ = build(2, rank, world_size)
    choice = choose_checkpoint(Path(root), make_record(), "auto", collectives)
    load_checkpoint(choice, parameters, optimizer, collectives, "host")
    assert optimizer.num_updates_done == choice.update == 2
    train_two_updates(parameters, optimizer, 2)
    return weights_digest(parameters)


def test_one_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert train_and_save(0, 1, str(tmp_path)) == load_and_train(0, 1, str(tmp_path))


@pytest.mark.dist
def test_two_ranks_go_on_bit_for_bit_and_one_rank_can(tmp_path: Path) -> None:
    trained = run_ranks(train_and_save, 2, str(tmp_path))
    assert trained[0] == trained[1]
    assert run_ranks(load_and_train, 2, str(tmp_path)) == trained
    # Gradients are given, so nothing is summed in another order with one rank.
    assert load_and_train(0, 1, str(tmp_path)) == trained[0]
