"""What is measured: a model with its optimizer, and passes and updates of one micro-batch as the trainer runs them."""

import gc
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nexttransformer.benchmark.options import BenchOptions
from nexttransformer.benchmark.rows import SyntheticRows
from nexttransformer.config import ModelConfig
from nexttransformer.data.loader import TrainingRows
from nexttransformer.errors import ConfigError
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.budget import Budget, measure
from nexttransformer.optim.groups import ParameterGroup, partition_parameters
from nexttransformer.optim.optimizer import Optimizer
from nexttransformer.protocol import Protocol
from nexttransformer.training.compiling import choose_settings
from nexttransformer.training.distributed import World, broadcast_parameters
from nexttransformer.training.feed import Batch, RowSource
from nexttransformer.training.gradients import without_reduction, wrap_forward
from nexttransformer.training.shares import MicroBatchPlan, largest_share, plan_micro_batches

# Standard deviation of output projections and head in the state "nonzero".
NONZERO_STD = 0.02
# More updates than any measurement makes, so that schedules never end.
_MIN_UPDATES = 100_000


@dataclass
class Subject:
    """One configuration, built on this rank. `build_seconds` is the time to weights on the device."""

    config: ModelConfig
    protocol: Protocol
    world: World
    model: Decoder
    optimizer: Optimizer
    groups: list[ParameterGroup]
    budget: Budget
    source: RowSource
    build_seconds: float
    num_filled: int

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its public name."""
        return dict(self.model.named_parameters())


@torch.no_grad()
def fill_nonzero(model: Decoder, seed: int) -> list[str]:
    """Draws the head and every matrix that starts at zero (output projections) from N(0, 0.02^2), in place.

    Freshly initialized output projections are zero: products then run on zeros, a GPU draws less power
    and looks about 12 % faster than in training.

    Returns:
        The names of these parameters, by their declared tags.
    """
    specs = model.parameter_specs()
    names = [
        name
        for name, parameter in model.named_parameters()
        if specs[name].tag == "head" or (specs[name].tag == "matrix" and not parameter.any())
    ]
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name in names:
        model.get_parameter(name).normal_(0.0, NONZERO_STD, generator=generator)
    return names


def build_subject(config: ModelConfig, options: BenchOptions, world: World) -> Subject:
    """Builds model and optimizer as a run does; equal weights on all ranks. Collective."""
    protocol = options.protocol
    start = time.perf_counter()
    model = build_model(config, world.device, seed=protocol.seed if world.is_main else None)
    filled = fill_nonzero(model, protocol.seed) if options.state == "nonzero" and world.is_main else []
    broadcast_parameters(world, model)
    groups = partition_parameters(model.parameter_specs(), protocol)
    optimizer = Optimizer(
        dict(model.named_parameters()),
        groups,
        protocol,
        num_updates=max(protocol.num_updates, _MIN_UPDATES),
        rank=world.rank,
        world_size=world.world_size,
        process_group=world.group,
    )
    source: RowSource = SyntheticRows(protocol)
    if options.site is not None:
        source = TrainingRows(options.site.data_folder(protocol.id), protocol)
    return Subject(
        config=config,
        protocol=protocol,
        world=world,
        model=model,
        optimizer=optimizer,
        groups=groups,
        budget=measure(model),
        source=source,
        build_seconds=time.perf_counter() - start,
        num_filled=len(filled),
    )


@dataclass
class Passes:
    """The compiled forward pass of one micro-batch and what an update of this rank consists of.

    Attributes:
        plan: this rank's micro-batches in an update.
        num_rows: rows of an update over all ranks.
        full_plan: the plan of a whole update of the protocol at this world size.
    """

    subject: Subject
    forward: nn.Module
    plan: MicroBatchPlan
    num_rows: int
    full_plan: MicroBatchPlan

    @property
    def micro_batch(self) -> int:
        """Rows of one pass."""
        return self.plan.micro_batch

    @property
    def update_tokens(self) -> int:
        """Trained tokens of an update over all ranks; padding does not count."""
        return self.num_rows * self.subject.protocol.context_tokens

    def rows(self) -> tuple[Tensor, Tensor]:
        """Returns ids [B, T + 1] and weights [B] of one micro-batch, on the device."""
        world = self.subject.world
        start = world.rank * self.micro_batch
        rows = SyntheticRows(self.subject.protocol).rows(0, start, start + self.micro_batch)
        ids_BT1 = torch.from_numpy(rows.astype("int64")).to(world.device)
        return ids_BT1, torch.ones(self.micro_batch, device=world.device)

    def run(self, ids_BT1: Tensor, weights_B: Tensor, *, num_passes: int = 1) -> Tensor:
        """Makes forward and backward passes that are not reduced over ranks; returns the last pass's nats."""
        assert num_passes >= 1
        nats = torch.zeros(())
        with without_reduction(self.forward):
            for _ in range(num_passes):
                loss, nats = self.forward(ids_BT1, weights_B)
                loss.backward()
        return nats

    def last_batch(self, ids_BT1: Tensor, weights_B: Tensor) -> tuple[Batch, MicroBatchPlan]:
        """Returns an update of a single micro-batch: the pass after which gradients are reduced."""
        num_rows = len(weights_B)
        return Batch(0, ids_BT1, weights_B, num_rows, 0), MicroBatchPlan(range(num_rows), num_rows)


def make_passes(subject: Subject, options: BenchOptions, micro_batch: int) -> Passes:
    """Wraps the model for one micro-batch; nothing is compiled before the first pass.

    Raises:
        ConfigError: if the micro-batch is more than a rank's share of the protocol's batch.
    """
    world, protocol = subject.world, subject.protocol
    limit = largest_share(world.world_size, protocol.global_batch_rows)
    if micro_batch > limit:
        raise ConfigError(
            f"--micro-batch {micro_batch}: a process has at most {limit} of the {protocol.global_batch_rows} rows of "
            f"a batch of {protocol.id} at {world.world_size} processes."
        )
    full_plan = plan_micro_batches(world.rank, world.world_size, protocol.global_batch_rows, micro_batch)
    plan, num_rows = full_plan, protocol.global_batch_rows
    if options.accumulation is not None:
        count = options.accumulation * micro_batch
        plan = MicroBatchPlan(range(world.rank * count, (world.rank + 1) * count), micro_batch)
        num_rows = world.world_size * count
        if options.site is not None and num_rows > protocol.global_batch_rows:
            raise ConfigError(
                f"--accumulation {options.accumulation}: {num_rows} rows at micro-batch {micro_batch} are more than "
                f"the {protocol.global_batch_rows} of an update. Lower it, or leave --site-config out."
            )
    settings = choose_settings(world, is_wanted=options.is_compiled)
    scale = world.world_size / (num_rows * protocol.context_tokens)
    forward = wrap_forward(subject.model, world, settings, loss_scale=scale)
    return Passes(subject, forward, plan, num_rows, full_plan)


def release(subject: Subject) -> None:
    """Frees gradients and compiled code after a micro-batch, whatever happened to it. Drop `Passes` before."""
    subject.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    if subject.world.device.type == "cuda":
        torch.cuda.empty_cache()
