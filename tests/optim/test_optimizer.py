"""The optimizer as a whole: partition, rates, state, and equality over world sizes."""

import math
import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nexttransformer.errors import CheckpointError, ConfigError
from nexttransformer.optim.groups import partition_parameters
from nexttransformer.optim.muon import muon_update
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.optim.sharding import ROUND_BYTES
from nexttransformer.protocol import FORMAL_V1
from tests.optim import toy

WORKER = Path(__file__).with_name("rank_worker.py")


def run_ranks(
    folder: Path,
    world_size: int,
    *,
    start: int = 0,
    stop: int,
    load: Path | None = None,
    round_bytes: int = ROUND_BYTES,
    backend: str = "gloo",
) -> list[dict[str, Any]]:
    """Runs updates in `world_size` processes and returns what each rank saved."""
    folder.mkdir()
    job = {
        "folder": str(folder),
        "world_size": world_size,
        "start": start,
        "stop": stop,
        "load": str(load) if load else None,
        "round_bytes": round_bytes,
        "backend": backend,
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    processes = [
        context.Process(target=runpy.run_path, args=(str(WORKER), {"JOB": {**job, "rank": rank}}))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world_size
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(world_size)]


def run_alone(stop: int) -> tuple[dict[str, nn.Parameter], Any]:
    parameters = toy.make_parameters()
    optimizer = toy.make_optimizer(parameters)
    toy.run_updates(optimizer, parameters, 0, stop)
    return parameters, optimizer


def merged_state(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    keys = [key for result in results for key in result["state"]]
    assert len(keys) == len(set(keys)), "a key was written by two ranks"
    return {key: tensor for result in results for key, tensor in result["state"].items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, atol: float = 0.0) -> None:
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(
            found[key], tensor.detach(), rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_each_parameter_gets_its_own_groups_update():
    parameters, optimizer = run_alone(1)
    start = toy.make_parameters()
    for group, rate in zip(toy.make_groups(), optimizer.learning_rates(0), strict=True):
        for name in group.names:
            gradient = toy.gradient(name, 0)
            if group.settings.optimizer == "adamw":
                # The first AdamW step is lr * sign(g), after the decay.
                expected = start[name] * (1 - rate * group.settings.weight_decay) - rate * gradient.sign()
                torch.testing.assert_close(parameters[name], expected, rtol=0, atol=1e-6)
            elif "attn" in name:
                eta_omega = rate * optimizer.applied_rates(0).muon_weight_decay
                torch.testing.assert_close(parameters[name], start[name] * (1 - eta_omega), rtol=0, atol=1e-6)


def muon_weight_decay_of_test_v1(update: int) -> float:
    # proxy-v1's: 0.28 at 2^19 tokens a batch, over 1,310,720,000 tokens; cosine over the run.
    return 0.28 * 12 * 110_100_912 / 1_310_720_000 * 0.5 * (1 + math.cos(math.pi * update / toy.NUM_UPDATES))


def test_batched_units_equal_single_ones():
    # Every unit again, one matrix at a time, at rates written out for test-v1.
    parameters, _ = run_alone(3)
    for name in toy.make_groups()[0].names:
        shape = toy.SPECS[name].shape
        m, n = shape[-2:]
        results_EMN = parameters[name].detach().view(-1, m, n)
        weights_EMN = toy.make_parameters()[name].detach().view(-1, m, n)
        for unit, w in enumerate(weights_EMN.split(1)):
            momentum, v = torch.zeros_like(w), torch.zeros(1, m, 1) if m >= n else torch.zeros(1, 1, n)
            for update in range(3):
                muon_update(
                    w,
                    toy.gradient(name, update).view(-1, m, n)[unit : unit + 1],
                    momentum,
                    v,
                    learning_rate=0.02 * (update + 1) / 4,
                    momentum=0.85 + 0.12 * update / 8,
                    weight_decay=muon_weight_decay_of_test_v1(update),
                    second_beta=0.9,
                    eps=1e-10,
                    compute_dtype=torch.float32,
                )
            torch.testing.assert_close(results_EMN[unit], w[0], rtol=0, atol=2e-6)


def test_applied_rates_are_read_back():
    parameters = toy.make_parameters()
    optimizer = toy.make_optimizer(parameters)
    with pytest.raises(ValueError, match="latest applied update is none"):
        optimizer.learning_rates(0)
    toy.run_updates(optimizer, parameters, 0, 2)
    settings = [group.settings for group in toy.make_groups()]
    assert [s.name for s in settings] == [s.name for s in toy.PROTOCOL.groups]
    # Update 1 of a warm-up of 4.
    assert optimizer.learning_rates(1) == pytest.approx([s.learning_rate * 0.5 for s in settings], rel=1e-15)
    assert optimizer.applied_rates(1).muon_momentum == pytest.approx(0.865)
    assert optimizer.applied_rates(1).muon_weight_decay == pytest.approx(muon_weight_decay_of_test_v1(1), rel=1e-12)
    with pytest.raises(ValueError, match="latest applied update is 1"):
        optimizer.learning_rates(0)


def test_updates_come_in_order():
    parameters = toy.make_parameters()
    optimizer = toy.make_optimizer(parameters)
    toy.run_updates(optimizer, parameters, 0, 1)
    assert optimizer.num_updates_done == 1
    for update in (0, 2):
        with pytest.raises(ValueError, match="expected 1"):
            optimizer.step(update)


def test_zero_grad_keeps_or_frees_the_memory():
    parameters = toy.make_parameters()
    optimizer = toy.make_optimizer(parameters)
    gradient = torch.ones(3)
    parameters["x0"].grad = gradient
    optimizer.zero_grad()
    assert parameters["x0"].grad is gradient and not gradient.any()
    optimizer.zero_grad(set_to_none=True)
    assert parameters["x0"].grad is None


def test_wrong_parameters_are_reported_together():
    parameters = toy.make_parameters()
    parameters["stray"] = nn.Parameter(torch.zeros(3))
    del parameters["gate"]
    with pytest.raises(ConfigError) as error:
        toy.make_optimizer(parameters)
    assert "'stray': in no optimizer group" in str(error.value)
    assert "'gate': in a group, but not in the model" in str(error.value)

    parameters = toy.make_parameters()
    parameters["lm_head"] = parameters["wte"]
    parameters["x0"] = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ConfigError) as error:
        toy.make_optimizer(parameters)
    assert "'lm_head': the same tensor as 'wte'" in str(error.value)
    assert "'x0': stored as torch.bfloat16" in str(error.value)


def test_state_is_named_and_whole():
    _, optimizer = run_alone(1)
    expected = optimizer.expected_state()
    state = optimizer.state_tensors()
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()} == expected
    assert expected["h.0.up::momentum"] == ((64, 16), torch.float32)
    assert expected["h.0.up::second_moment"] == ((64, 1), torch.float32)
    assert expected["h.0.down::second_moment"] == ((1, 64), torch.float32)
    assert expected["experts::second_moment"] == ((3, 24, 1), torch.float32)
    assert expected["backout::adam_m"] == expected["backout::adam_v"] == ((), torch.float32)
    assert len(expected) == 2 * len(toy.SPECS)


def test_saved_state_continues_bit_for_bit(tmp_path):
    parameters, optimizer = run_alone(4)
    # Through a file, as slices of larger storage are saved.
    save_file(dict(optimizer.state_tensors()), tmp_path / "state.safetensors")
    saved = load_file(tmp_path / "state.safetensors")
    resumed = toy.make_parameters()
    for name, parameter in resumed.items():
        parameter.data.copy_(parameters[name].data)
    other = toy.make_optimizer(resumed)
    other.load_state(saved.__getitem__)
    other.num_updates_done = 4
    toy.run_updates(other, resumed, 4, 8)
    toy.run_updates(optimizer, parameters, 4, 8)
    assert_equal(resumed, parameters)
    assert_equal(other.state_tensors(), optimizer.state_tensors())


def test_foreign_state_is_refused():
    _, optimizer = run_alone(1)
    with pytest.raises(CheckpointError, match="'h.9.up::momentum': unknown here"):
        optimizer.load_state_tensor("h.9.up::momentum", torch.zeros(64, 16))
    with pytest.raises(CheckpointError, match=r"'h.0.up::momentum': got \[16, 64\] torch.float32, expected \[64, 16\]"):
        optimizer.load_state_tensor("h.0.up::momentum", torch.zeros(16, 64))
    with pytest.raises(CheckpointError, match="got .* torch.bfloat16"):
        optimizer.load_state_tensor("h.0.up::momentum", torch.zeros(64, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("world_size", [2, 8])
def test_writers_share_the_bytes_of_dense_full(world_size):
    # On the meta device: names and shapes only. Weights 5.42 GB by rank 0, states 8.24 GB by all.
    from tests.optim.test_groups import dense_full_specs

    specs = dense_full_specs()
    parameters = {name: nn.Parameter(torch.empty(spec.shape, device="meta")) for name, spec in specs.items()}
    groups = partition_parameters(specs, FORMAL_V1)
    written = [4 * 1_355_810_568] + [0] * (world_size - 1)
    keys: list[str] = []
    for rank in range(world_size):
        optimizer = Optimizer(parameters, groups, FORMAL_V1, num_updates=46_875, rank=rank, world_size=world_size)
        for key, tensor in optimizer.state_tensors().items():
            keys.append(key)
            written[rank] += 4 * tensor.numel()
    assert sorted(keys) == sorted(optimizer.expected_state())
    # base_model.md, section 1: 13,666,753,440 bytes in all.
    assert sum(written) == 13_666_753_440
    even = max(13_666_753_440 / world_size, 4 * 1_355_810_568 + 2_604_669_696 / world_size)
    assert max(written) < 1.1 * even


@pytest.mark.dist
@pytest.mark.parametrize("round_bytes", [2**27, 5000])
def test_two_ranks_equal_one(tmp_path, round_bytes):
    parameters, optimizer = run_alone(6)
    results = run_ranks(tmp_path / "two", 2, stop=6, round_bytes=round_bytes)
    for result in results:
        assert_equal(result["parameters"], results[0]["parameters"])
        assert_equal(result["parameters"], parameters, atol=1e-6)
        assert result["rates"] == optimizer.learning_rates(5)
        assert result["writers"] == results[0]["writers"]
    state = merged_state(results)
    assert {key: (tuple(t.shape), t.dtype) for key, t in state.items()} == optimizer.expected_state()
    assert_equal(state, optimizer.state_tensors(), atol=1e-6)
    # Muon's state exists once, AdamW's on every rank.
    kept = [set(result["kept"]) for result in results]
    assert not any(key.endswith(("momentum", "second_moment")) for key in kept[0] & kept[1])
    assert {key for key in state if "::adam_" in key} == kept[0] & kept[1]


@pytest.mark.dist
def test_state_saved_by_two_ranks_loads_on_one_and_three(tmp_path):
    first = run_ranks(tmp_path / "first", 2, stop=3)
    saved = tmp_path / "saved.pt"
    torch.save({"parameters": first[0]["parameters"], "state": merged_state(first)}, saved)
    undisturbed, optimizer = run_alone(6)

    parameters = toy.make_parameters()
    for name, parameter in parameters.items():
        parameter.data.copy_(first[0]["parameters"][name])
    alone = toy.make_optimizer(parameters)
    alone.load_state(merged_state(first).__getitem__)
    assert_equal(alone.state_tensors(), merged_state(first))
    alone.num_updates_done = 3
    toy.run_updates(alone, parameters, 3, 6)
    assert_equal(parameters, undisturbed, atol=1e-6)

    three = run_ranks(tmp_path / "three", 3, start=3, stop=6, load=saved)
    assert_equal(three[2]["parameters"], undisturbed, atol=1e-6)
    assert_equal(merged_state(three), optimizer.state_tensors(), atol=1e-6)
