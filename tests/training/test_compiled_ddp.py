"""The compiled model in DDP, in two processes: the graph is cut at the buckets, once, and gradients stay what they are.

Compiled with dynamo and AOT autograd only ("aot_eager"): what differs on a GPU is the code of each graph.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from tests.distributed import run_ranks
from tests.ops.lookup_stub import install_lookup_gradient
from tests.training.trainer_runs import fill_zero_outputs

NUM_UPDATES, NUM_MICRO_BATCHES, ROWS = 2, 3, 2


def _rows(config: Any, update: int, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * update + 10 * index + rank)
    return torch.randint(0, config.vocab_size, (ROWS, config.context_tokens + 1), generator=generator)


def _gradients_of_rank(rank: int, world_size: int, method: str) -> tuple[dict[str, float], list[int], int]:
    """Returns the relative difference of each gradient from eager autograd over all ranks' rows, the sizes of the
    graphs, and how often the model was compiled.
    """
    import torch.distributed as dist
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    from nexttransformer.models import decoder, layers
    from nexttransformer.ops import norm
    from nexttransformer.ops.lookup_gradient.order import order_tokens
    from nexttransformer.training import gradients
    from nexttransformer.training.compiling import CompileSettings, TrainingForward
    from nexttransformer.training.distributed import World

    graphs: list[int] = []

    def backend(graph: Any, inputs: list[Tensor], **settings: Any) -> Any:
        graphs.append(len(list(graph.graph.nodes)))
        return aot_eager(graph, inputs, **settings)

    plain_compile = nn.Module.compile
    nn.Module.compile = lambda self, **settings: plain_compile(self, backend=backend, **settings)
    gradients.BUCKET_MIB = 0.25
    # As on a GPU, where tensors have 16 bits.
    norm.has_written_out_gradient = layers.has_written_out_gradient = lambda x: True
    decoder.lookup_order = lambda ids, weight_VD, dtype: order_tokens(ids, weight_VD.shape[0])
    install_lookup_gradient()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100_000  # pyright: ignore[reportPrivateImportUsage]

    config = resolve_method(method_files()[method], "test-v1")
    model = build_model(config, seed=1)
    fill_zero_outputs(model)
    model.prepare(torch.device("cpu"))

    class _World:
        group, device = dist.group.WORLD, torch.device("cpu")

    world: World = _World()  # pyright: ignore[reportAssignmentType]
    scale = 1 / (ROWS * NUM_MICRO_BATCHES)
    forward = gradients.wrap_forward(model, world, CompileSettings("model"), loss_scale=scale)
    weights = torch.ones(ROWS)
    for update in range(NUM_UPDATES):
        model.zero_grad()
        for index in range(NUM_MICRO_BATCHES):
            is_last = index + 1 == NUM_MICRO_BATCHES
            with nullcontext() if is_last else gradients.without_reduction(forward):
                forward(_rows(config, update, index, rank), weights)[0].backward()
    reduced = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # pyright: ignore
    model.zero_grad()
    eager = TrainingForward(model, scale / world_size)
    for each in range(world_size):
        for index in range(NUM_MICRO_BATCHES):
            eager(_rows(config, NUM_UPDATES - 1, index, each), weights)[0].backward()
    differences = {
        name: ((parameter.grad - reduced[name]).norm() / parameter.grad.norm()).item()  # pyright: ignore
        for name, parameter in model.named_parameters()
    }
    return differences, graphs, counters["stats"]["unique_graphs"]


@pytest.mark.dist
@pytest.mark.parametrize("method", ["dense_full", "mhc_lite"])
def test_graph_is_cut_at_buckets_and_gradients_are_the_sums(method: str) -> None:
    for differences, graphs, num_compiled in run_ranks(_gradients_of_rank, 2, method):
        # Cut into several graphs; none compiled again where a micro-batch reduces or an update begins.
        assert len(graphs) >= 3 and num_compiled == 1
        assert max(differences.values()) < 1e-5, differences
