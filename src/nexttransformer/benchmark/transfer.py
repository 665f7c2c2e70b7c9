"""Speed of what moves: rows to the device, gradients and weights between ranks."""

import time
from typing import Any

import torch
import torch.distributed as dist

from nexttransformer.benchmark.subject import Subject
from nexttransformer.benchmark.timing import repeat, slowest, summary, synchronize
from nexttransformer.training.feed import RowFeed
from nexttransformer.training.gradients import BUCKET_MIB
from nexttransformer.training.shares import plan_micro_batches

_NUM_UPDATES = {"cuda": 12, "cpu": 4}
_NUM_STEPS = {"cuda": 20, "cpu": 3}


def measure_data(subject: Subject, micro_batch: int, rows: str) -> dict[str, Any]:
    """Times reading, hashing, pinning and copying the rows of whole updates while nothing is computed.

    Args:
        subject: its source of rows.
        micro_batch: rows of a pass.
        rows: "prepared" or "synthetic", for the record.
    """
    world, protocol = subject.world, subject.protocol
    plan = plan_micro_batches(world.rank, world.world_size, protocol.global_batch_rows, micro_batch)
    num_updates = _NUM_UPDATES[world.device.type]
    start = time.perf_counter()
    feed = RowFeed(
        subject.source,
        plan,
        context_tokens=protocol.context_tokens,
        first_update=0,
        last_update=num_updates,
        device=world.device,
    )
    try:
        for update in range(num_updates):
            feed.take(update)
        synchronize(world.device)
    finally:
        feed.close()
    seconds = slowest(world, time.perf_counter() - start, key=float)
    tokens = num_updates * protocol.tokens_per_update
    return {
        "rows": rows,
        "num_updates": num_updates,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def measure_communication(subject: Subject) -> dict[str, Any]:
    """States the bytes that an update sends and times an all-reduce of one bucket; no bandwidth with one rank.

    `algorithm_bytes_per_second` is payload over time; a ring moves 2 (W - 1) / W of the payload through
    each link, which gives `link_bytes_per_second`.
    """
    world = subject.world
    gradient_bytes = sum(4 * parameter.numel() for parameter in subject.model.parameters())
    muon_bytes = sum(
        4 * subject.parameters[name].numel()
        for group in subject.groups
        if group.settings.optimizer == "muon"
        for name in group.names
    )
    size = world.world_size
    ring = 2 * (size - 1) / size
    result: dict[str, Any] = {
        "world_size": size,
        "gradient_bytes": gradient_bytes,
        "muon_bytes": muon_bytes,
        # All-reduce of the gradients, all-gather of the matrices that other ranks updated.
        "sent_bytes_per_rank_and_update": round(ring * gradient_bytes + (size - 1) / size * muon_bytes),
        "bucket_bytes": BUCKET_MIB * 2**20,
        "bucket_seconds": None,
        "algorithm_bytes_per_second": None,
        "link_bytes_per_second": None,
        "reduction_seconds_per_update": None,
    }
    if world.group is None:
        return result
    bucket = torch.zeros(BUCKET_MIB * 2**18, device=world.device)
    samples = repeat(
        world.device,
        lambda: dist.all_reduce(bucket, group=world.group),
        num_steps=_NUM_STEPS[world.device.type],
        num_warmup=2,
    )
    seconds = summary(slowest(world, samples, key=sum))["median_seconds"]
    rate = bucket.numel() * 4 / seconds
    return {
        **result,
        "bucket_seconds": seconds,
        "algorithm_bytes_per_second": rate,
        "link_bytes_per_second": ring * rate,
        "reduction_seconds_per_update": gradient_bytes / rate,
    }
