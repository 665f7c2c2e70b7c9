"""Six updates of the tiny model: model, loss, both optimizers and schedules together (base_model.md, section 9.4)."""

import pytest
import torch

from nexttransformer.optim.groups import partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import FORMAL_V1
from tests.models.tiny import golden_model, golden_tokens

LOSSES = (6.595600, 6.687869, 6.642654, 6.690170, 6.773182, 6.631087)


def test_six_updates_of_the_tiny_model():
    model = golden_model([16, 16, 16, None])
    parameters = dict(model.named_parameters())
    groups = partition_parameters(model.parameter_specs(), FORMAL_V1)
    optimizer = Optimizer(parameters, groups, FORMAL_V1, num_updates=46_875)
    losses = []
    for update in range(6):
        ids_BT, targets_BT = golden_tokens(64, rows=(2 * update, 2 * update + 1))
        loss = model(ids_BT, targets_BT).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step(update)
        optimizer.zero_grad()
    assert losses == pytest.approx(LOSSES, abs=2e-5)

    def entries(name: str) -> list[float]:
        return parameters[name].detach().tolist()

    def norm(name: str) -> float:
        return torch.linalg.vector_norm(parameters[name].detach(), dtype=torch.float64).item()

    assert entries("resid_lambdas") == pytest.approx([1.147520, 1.115196, 1.081285, 1.050703], abs=2e-5)
    assert entries("x0_lambdas") == pytest.approx([-0.022711, 0.072235, -0.100038, -0.085947], abs=2e-5)
    assert entries("smear_lambda") == pytest.approx([0.323069], abs=2e-5)
    assert entries("backout_lambda") == pytest.approx([0.175097], abs=2e-5)
    norms = {
        "transformer.h.0.attn.c_q.weight": 14.780445,
        "transformer.h.3.mlp.c_proj.weight": 14.777598,
        "transformer.wte.weight": 209.87091,
        "value_embeds.1.weight": 105.04271,
        "lm_head.weight": 20.876643,
    }
    assert {name: norm(name) for name in norms} == pytest.approx(norms, rel=2e-6)
