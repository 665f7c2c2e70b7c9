"""Every registered method: pinned figures, names and shapes, all checks passed, training, strict saving and loading.

A method's own tests (equations, equality with the base, oracles) are beside its parts.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nexttransformer.checking.method import check_method
from nexttransformer.checking.tiny import random_ids, tiny_copy
from nexttransformer.config import ModelConfig, load_method, method_files, resolve_method
from nexttransformer.models import build_model, list_methods
from nexttransformer.optim.groups import partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import FORMAL_V1, TEST_V1
from nexttransformer.training.run_record import tensors_digest

GOLDEN = Path(__file__).parents[1] / "golden/methods.json"
METHODS = list_methods()


@cache
def golden() -> dict[str, dict[str, Any]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def two_layers(method: str) -> ModelConfig:
    """Returns the first and the last layer of a tiny copy."""
    config = tiny_copy(resolve_method(method_files()[method], FORMAL_V1))
    return config.model_copy(update={"num_layers": 2, "layers": [config.layers[0], config.layers[-1]]})


def test_every_method_is_pinned_and_no_other() -> None:
    assert sorted(golden()) == sorted(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_names_and_shapes_are_pinned(method: str) -> None:
    """Published weights load strictly: a changed name or shape breaks them."""
    specs = build_model(resolve_method(method_files()[method], FORMAL_V1), "meta").parameter_specs()
    found = {
        "num_parameters": sum(torch.Size(spec.shape).numel() for spec in specs.values()),
        "num_tensors": len(specs),
        "tensors_digest": tensors_digest(specs),
    }
    assert found == golden().get(method), f"{GOLDEN.name}: a new method needs {json.dumps({method: found})}"


@pytest.mark.parametrize("method", METHODS)
def test_every_check_passes(method: str) -> None:
    report = check_method(load_method(method_files()[method]), FORMAL_V1)
    assert [str(finding) for finding in report.findings] == []
    assert report.deviation is not None and abs(report.deviation) <= 0.005
    assert report.track is not None and report.track.name == "main"


@pytest.mark.parametrize("method", METHODS)
def test_training_saving_and_strict_loading(method: str, tmp_path: Path) -> None:
    config = two_layers(method)
    model = build_model(config, seed=0)
    parameters = dict(model.named_parameters())
    groups = partition_parameters(model.parameter_specs(), TEST_V1)
    optimizer = Optimizer(parameters, groups, TEST_V1, num_updates=20)
    ids_BT = random_ids(config, rows=2, num_tokens=17)
    losses = []
    for update in range(20):
        loss = model(ids_BT[:, :-1], ids_BT[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(update)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(6.2383, abs=0.01), "ln 512"
    assert losses[-1] < losses[0] / 2
    assert all(torch.isfinite(parameter).all() for parameter in parameters.values())

    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "weights")
    tensors = load_file(tmp_path / "weights")
    assert tensors.keys() == parameters.keys()
    again = build_model(config, seed=None)
    again.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        assert torch.equal(again(ids_BT), model(ids_BT))
    removed = tensors.pop("lm_head.weight")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*lm_head.weight"):
        again.load_state_dict(tensors, strict=True)
    with pytest.raises(RuntimeError, match="size mismatch for lm_head.weight"):
        again.load_state_dict({**tensors, "lm_head.weight": removed[:-1]}, strict=True)
