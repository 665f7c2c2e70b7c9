"""From rows to synchronized gradients: the wrapped forward pass, and the accumulation over micro-batches.

The trainer and the `bench` command run exactly this.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nexttransformer.models import Decoder
from nexttransformer.training.compiling import CompileSettings, TrainingForward, compile_in_place
from nexttransformer.training.distributed import World
from nexttransformer.training.feed import Batch
from nexttransformer.training.shares import MicroBatchPlan

# Gradients are reduced in buckets of about this size, in the order in which the backward pass makes them. The compiled
# graph is cut where a bucket ends and nothing is fused across a cut: cuts cost every micro-batch, while only the last
# one reduces. Six graphs of the formal model leave about a fifth of the reduction uncovered, 25 graphs (100 MiB) a
# twentieth.
BUCKET_MIB = 900


def wrap_forward(model: Decoder, world: World, settings: CompileSettings, *, loss_scale: float) -> nn.Module:
    """Returns the training forward pass: compiled as told, in DDP if there are several ranks.

    Args:
        model: on the world's device.
        world: all ranks.
        settings: what is compiled.
        loss_scale: W / tokens per update, see `TrainingForward`.
    """
    forward = TrainingForward(model, loss_scale)
    compile_in_place(forward, settings)
    if world.group is None:
        return forward
    return DistributedDataParallel(
        forward,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=world.group,
        bucket_cap_mb=BUCKET_MIB,
        gradient_as_bucket_view=True,
        find_unused_parameters=False,
        static_graph=False,
    )


def without_reduction(forward: nn.Module) -> AbstractContextManager:
    """Returns a context in which backward passes only add to this rank's own gradients."""
    return forward.no_sync() if isinstance(forward, DistributedDataParallel) else nullcontext()


def accumulate_gradients(
    forward: nn.Module,
    batch: Batch,
    plan: MicroBatchPlan,
    *,
    on_nats: Callable[[Tensor], None] = lambda nats: None,
    on_last: Callable[[], None] = lambda: None,
) -> Tensor:
    """Runs forward and backward over this rank's micro-batches; returns its sum of nats (float64 scalar).

    Gradients are synchronized once, in the rank's last micro-batch; every rank then issues the same
    collectives, though the numbers of micro-batches may differ.

    Args:
        forward: from `wrap_forward`.
        batch: this rank's rows.
        plan: how they are cut.
        on_nats: called with the nats of each micro-batch before its backward pass.
        on_last: called before the backward pass that synchronizes.
    """
    total = torch.zeros((), dtype=torch.float64, device=batch.ids_RT1.device)
    for index in range(plan.num_micro_batches):
        part = slice(index * plan.micro_batch, (index + 1) * plan.micro_batch)
        is_last = index + 1 == plan.num_micro_batches
        with nullcontext() if is_last else without_reduction(forward):
            loss, nats = forward(batch.ids_RT1[part], batch.weights_R[part])
            on_nats(nats)
            if is_last:
                on_last()
            loss.backward()
        total += nats
    return total
