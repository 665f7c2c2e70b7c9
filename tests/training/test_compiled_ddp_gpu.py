"""The compiled model in DDP on two GPUs, kernels included: gradients are those of eager autograd over all rows."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.ops.self_check import check_kernels
from tests.distributed import run_ranks
from tests.training.trainer_runs import fill_zero_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.timeout(1800),
]
ROWS, NUM_MICRO_BATCHES = 2, 2


def _rows(config: Any, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randint(0, config.vocab_size, (ROWS, config.context_tokens + 1), generator=generator).cuda()


def _gradients_of_rank(rank: int, world_size: int, method: str) -> dict[str, float]:
    """Returns the relative difference of each gradient from eager autograd over all ranks' rows."""
    import torch.distributed as dist

    from nexttransformer.training import gradients
    from nexttransformer.training.compiling import CompileSettings, TrainingForward

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    gradients.BUCKET_MIB = 4
    config = resolve_method(method_files()[method], "demo-v1")
    check_kernels(config, mode="open", device=device)
    model = build_model(config, device, seed=1)
    fill_zero_outputs(model)
    model.prepare(device)

    class _World:
        group = dist.group.WORLD

    world: Any = _World()
    world.device = device
    scale = 1 / (ROWS * NUM_MICRO_BATCHES * config.context_tokens)
    forward = gradients.wrap_forward(model, world, CompileSettings("model"), loss_scale=scale)
    weights = torch.ones(ROWS, device=device)
    # The second round runs with DDP's rebuilt buckets.
    for _ in range(2):
        model.zero_grad()
        for index in range(NUM_MICRO_BATCHES):
            is_last = index + 1 == NUM_MICRO_BATCHES
            with nullcontext() if is_last else gradients.without_reduction(forward):
                forward(_rows(config, index, rank), weights)[0].backward()
    reduced = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # pyright: ignore
    model.zero_grad()
    eager = TrainingForward(model, scale / world_size)
    for each in range(world_size):
        for index in range(NUM_MICRO_BATCHES):
            eager(_rows(config, index, each), weights)[0].backward()
    return {
        name: ((parameter.grad - reduced[name]).norm() / parameter.grad.norm()).item()  # pyright: ignore
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("method", ["dense_full", "sssl", "xsa", "mhc_lite", "attnres_full", "gdn_hybrid"])
def test_gradients_are_the_sums(method: str) -> None:
    for differences in run_ranks(_gradients_of_rank, 2, method, limit_seconds=900):
        # bfloat16 on both sides, in another order; a gradient that is lost differs by 1.
        assert max(differences.values()) < 0.2, differences
