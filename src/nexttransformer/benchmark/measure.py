"""The parts that train: single passes, whole updates, the optimizer alone."""

import time
from typing import Any

import torch
from torch import Tensor

from nexttransformer.benchmark.options import BenchOptions
from nexttransformer.benchmark.subject import Passes, Subject
from nexttransformer.benchmark.timing import (
    Clock,
    peak_memory,
    repeat,
    reset_peak_memory,
    slowest,
    summary,
    synchronize,
)
from nexttransformer.errors import RunFailure
from nexttransformer.training.compiling import cache_lookups, graph_breaks, num_graphs
from nexttransformer.training.feed import Batch, RowFeed
from nexttransformer.training.gradients import accumulate_gradients, without_reduction
from nexttransformer.training.metrics_math import Throughput, peak_flops
from nexttransformer.training.update_totals import LocalTotals, UpdateTotals, gradient_norm, reduce_totals
from nexttransformer.training.versions import device_name

# An update is timed at least so often, however many passes it has.
_MIN_UPDATES = 3
# DDP arranges its buckets anew in the second update.
_WARMUP_UPDATES = 2


def speed(subject: Subject, tokens: int, seconds: float) -> dict[str, Any]:
    """Returns tokens, tokens per second of all devices and the utilization by both conventions.

    `mfu_causal_exact` counts the multiply-adds that causal rows need (the protocol's count);
    `mfu_nominal` charges attention every key of its window, as nanochat's figures do. None without a
    known peak of the device.
    """
    throughput = Throughput(
        flops_per_token=subject.budget.training_flops_per_token,
        nominal_flops_per_token=subject.budget.nominal_flops_per_token,
        peak=peak_flops(device_name(subject.world.device)),
        world_size=subject.world.world_size,
    )
    rate = tokens / seconds
    return {
        "tokens": tokens,
        "tokens_per_second": rate,
        "mfu_causal_exact": throughput.mfu(rate),
        "mfu_nominal": throughput.nominal_mfu(rate),
    }


def measure_step(passes: Passes, options: BenchOptions) -> dict[str, Any]:
    """Times forward and backward of one micro-batch, without reduction over ranks and without the optimizer.

    Raises:
        RunFailure: if the loss is not finite: the figures would not be those of training.
    """
    subject, world = passes.subject, passes.subject.world
    ids_BT1, weights_B = passes.rows()
    subject.model.set_step(0)
    reset_peak_memory(world.device)
    synchronize(world.device)
    start = time.perf_counter()
    passes.run(ids_BT1, weights_B)
    synchronize(world.device)
    first_seconds = time.perf_counter() - start
    if options.num_warmup > 1:
        passes.run(ids_BT1, weights_B, num_passes=options.num_warmup - 1)
    num_graphs_before = num_graphs()
    clock = Clock(world.device)
    nats = torch.zeros(())
    with without_reduction(passes.forward):
        clock.mark()
        for _ in range(options.num_steps):
            loss, nats = passes.forward(ids_BT1, weights_B)
            clock.mark()
            loss.backward()
            clock.mark()
    seconds = clock.seconds()
    if not bool(torch.isfinite(nats)):
        raise RunFailure(f"The loss of {subject.config.method} is not finite at these weights; nothing was measured.")
    pairs = slowest(world, list(zip(seconds[::2], seconds[1::2], strict=True)), key=lambda each: sum(map(sum, each)))
    steps = summary([forward + backward for forward, backward in pairs])
    subject.optimizer.zero_grad()
    return {
        "seconds": steps,
        "forward_seconds": summary([forward for forward, _ in pairs])["median_seconds"],
        "backward_seconds": summary([backward for _, backward in pairs])["median_seconds"],
        "first_step_seconds": first_seconds,
        "compile_cache": cache_lookups(),
        "num_graphs": num_graphs(),
        "num_recompilations": num_graphs() - num_graphs_before,
        "graph_breaks": graph_breaks(),
        "peak_memory_bytes": peak_memory(world.device),
        **speed(
            subject,
            passes.micro_batch * subject.protocol.context_tokens * world.world_size,
            steps["median_seconds"],
        ),
    }


def finish_update(passes: Passes, batch: Batch, nats: Tensor) -> UpdateTotals:
    """Does what follows the backward passes: norm, the reduction of the totals, the step."""
    subject = passes.subject
    gradients = [tensor.grad for tensor in subject.model.parameters() if tensor.grad is not None]
    local = LocalTotals(
        tokens=batch.num_rows * subject.protocol.context_tokens,
        rows=batch.num_rows,
        rows_hash=batch.rows_hash,
        stop=False,
        save=False,
        failure=batch.problem is not None,
    )
    totals = reduce_totals(subject.world, local, nats, gradient_norm(gradients))
    subject.optimizer.step(subject.optimizer.num_updates_done)
    subject.optimizer.zero_grad()
    return totals


def measure_update(passes: Passes, options: BenchOptions) -> dict[str, Any]:
    """Times whole updates: rows, all passes, gradient reduction, the small reduction and the optimizer.

    Raises:
        RunFailure: if loss or gradient is not finite or rows could not be read.
    """
    subject, world = passes.subject, passes.subject.world
    first = subject.optimizer.num_updates_done
    num_timed = max(_MIN_UPDATES, -(-options.num_steps // passes.plan.num_micro_batches))
    # Rows start at update 0 of the data, whatever the optimizer has done so far.
    feed = RowFeed(
        subject.source,
        passes.plan,
        context_tokens=subject.protocol.context_tokens,
        first_update=0,
        last_update=_WARMUP_UPDATES + num_timed,
        device=world.device,
    )
    clock, waits = Clock(world.device), []
    reset_peak_memory(world.device)
    try:
        for index in range(_WARMUP_UPDATES + num_timed):
            if index == _WARMUP_UPDATES:
                synchronize(world.device)
                clock.mark()
                began, num_graphs_before = time.perf_counter(), num_graphs()
            before = time.perf_counter()
            batch = feed.take(index)
            waits.append(time.perf_counter() - before)
            subject.model.set_step(first + index)
            totals = finish_update(passes, batch, accumulate_gradients(passes.forward, batch, passes.plan))
            if not totals.is_finite or totals.num_failures:
                reason = batch.problem or "loss or gradient is not finite"
                raise RunFailure(f"Update {index + 1} of {subject.config.method}: {reason}. Nothing was measured.")
            clock.mark()
        seconds = clock.seconds()
        wall_seconds = time.perf_counter() - began
    finally:
        feed.close()
    updates = summary(slowest(world, seconds, key=sum))
    wait_seconds = sum(waits[_WARMUP_UPDATES:])
    return {
        "seconds": updates,
        "num_micro_batches": passes.plan.num_micro_batches,
        "num_padded_rows": passes.plan.num_padded,
        "num_recompilations": num_graphs() - num_graphs_before,
        "peak_memory_bytes": peak_memory(world.device),
        "data_wait_seconds": wait_seconds / num_timed,
        "data_wait_fraction": wait_seconds / wall_seconds,
        "rows": "prepared" if options.site is not None else "synthetic",
        **speed(subject, passes.update_tokens, updates["median_seconds"]),
    }


@torch.no_grad()
def fill_gradients(subject: Subject) -> None:
    """Gives every parameter a random gradient, the same on all ranks."""
    generator = torch.Generator(subject.world.device).manual_seed(subject.protocol.seed)
    for parameter in subject.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.normal_(0.0, 1e-3, generator=generator)


def measure_optimizer(subject: Subject, options: BenchOptions) -> dict[str, Any]:
    """Times the optimizer's step alone, its exchange between ranks included."""
    optimizer = subject.optimizer
    fill_gradients(subject)
    reset_peak_memory(subject.world.device)
    samples = repeat(
        subject.world.device,
        lambda: optimizer.step(optimizer.num_updates_done),
        num_steps=options.num_steps,
        num_warmup=options.num_warmup,
    )
    state = optimizer.expected_state()
    optimizer.zero_grad()
    return {
        "seconds": summary(slowest(subject.world, samples, key=sum)),
        "num_parameters": subject.budget.num_parameters,
        "state_bytes": sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in state.values()),
        "peak_memory_bytes": peak_memory(subject.world.device),
    }
