"""The trainer's own gradient path on the golden short run of the tiny model (base_model.md, section 9.4)."""

import pytest
import torch

from nexttransformer.optim.groups import partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import FORMAL_V1
from nexttransformer.training.compiling import TrainingForward
from tests.models.tiny import golden_model, golden_tokens

LOSSES = (6.595600, 6.687869, 6.642654, 6.690170, 6.773182, 6.631087)


def test_six_updates_in_micro_batches_with_a_padded_row():
    model = golden_model([16, 16, 16, None])
    parameters = dict(model.named_parameters())
    groups = partition_parameters(model.parameter_specs(), FORMAL_V1)
    optimizer = Optimizer(parameters, groups, FORMAL_V1, num_updates=46_875)
    forward = TrainingForward(model, loss_scale=1 / 128)
    losses = []
    for update in range(6):
        ids_BT, targets_BT = golden_tokens(64, rows=(2 * update, 2 * update + 1))
        rows = torch.cat([ids_BT, targets_BT[:, -1:]], dim=1)
        nats = torch.zeros((), dtype=torch.float64)
        # One row, then the other with a copy of the first at weight 0.
        for part, weights in ((rows[:1], [1.0]), (rows[[1, 0]], [1.0, 0.0])):
            loss, part_nats = forward(part, torch.tensor(weights))
            loss.backward()
            nats += part_nats
        losses.append(nats.item() / 128)
        optimizer.step(update)
        optimizer.zero_grad()
    assert losses == pytest.approx(LOSSES, abs=2e-5)
    assert parameters["resid_lambdas"].tolist() == pytest.approx([1.147520, 1.115196, 1.081285, 1.050703], abs=2e-5)
    assert parameters["x0_lambdas"].tolist() == pytest.approx([-0.022711, 0.072235, -0.100038, -0.085947], abs=2e-5)
    assert parameters["smear_lambda"].item() == pytest.approx(0.323069, abs=2e-5)
    assert parameters["backout_lambda"].item() == pytest.approx(0.175097, abs=2e-5)
    assert parameters["lm_head.weight"].norm().item() == pytest.approx(20.876643, rel=2e-6)
