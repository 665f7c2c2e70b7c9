"""Small parts of the trainer against hand-made numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.data.order import row_hash
from nexttransformer.errors import DataError
from nexttransformer.protocol import FORMAL_V1, TEST_V1
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.distributed import World
from nexttransformer.training.feed import RowFeed
from nexttransformer.training.guards import SpikeCounter
from nexttransformer.training.metrics_math import Throughput, peak_flops, show_duration
from nexttransformer.training.saving import save_updates
from nexttransformer.training.shares import plan_micro_batches, rank_rows, rank_share
from nexttransformer.training.update_totals import LocalTotals, gradient_norm, reduce_totals

WORLD = World(0, 1, 0, 0, 1, torch.device("cpu"), "host", SingleProcess())


def test_shares_of_three_ranks():
    assert rank_rows(3, 512) == [170, 171, 171]


@settings(max_examples=25)
@given(st.integers(1, 512), st.integers(1, 600))
def test_shares_cover_every_row_once(world_size, micro_batch):
    rows = [row for rank in range(world_size) for row in rank_share(rank, world_size, 512)]
    assert rows == list(range(512))
    plans = [plan_micro_batches(rank, world_size, 512, micro_batch) for rank in range(world_size)]
    assert len({plan.micro_batch for plan in plans}) == 1
    for plan in plans:
        assert plan.num_micro_batches >= 1 and 0 <= plan.num_padded < plan.micro_batch
        assert plan.num_micro_batches * plan.micro_batch == len(plan.rows) + plan.num_padded


def test_small_reduction_keeps_64_bit_hashes_exact():
    local = LocalTotals(tokens=2**20, rows=512, rows_hash=2**64 - 3, stop=False, save=True, failure=False)
    nats = torch.tensor(1.25, dtype=torch.float64)
    totals = reduce_totals(WORLD, local, nats, torch.tensor(3.0, dtype=torch.float64))
    assert (totals.rows_hash, totals.tokens, totals.num_saves, totals.num_stops) == (2**64 - 3, 2**20, 1, 0)
    assert (totals.nats, totals.gradient_norm, totals.is_finite) == (1.25, 3.0, True)


@pytest.mark.parametrize(("nats", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_small_reduction_sees_nonfinite_numbers(nats, norm):
    local = LocalTotals(tokens=1, rows=1, rows_hash=0, stop=False, save=False, failure=False)
    totals = reduce_totals(
        WORLD, local, torch.tensor(nats, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
    )
    assert not totals.is_finite


def test_gradient_norm():
    assert gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0, 12.0]])]).item() == pytest.approx(13.0)


def test_spikes_are_counted_against_the_last_128_losses():
    counter = SpikeCounter()
    losses = [2.0 + 0.1 * (-1) ** number for number in range(128)]
    assert all(counter.add(loss) is None for loss in losses)
    # Mean 2, deviation 0.1: the limit is 2.6.
    assert counter.add(2.59) is None
    again = SpikeCounter(losses, num_spikes=3)
    spike = again.add(2.61)
    assert spike is not None and spike["mean_nats"] == pytest.approx(2.0) and again.num_spikes == 4
    assert len(again.losses) == 128 and again.losses[-1] == 2.61


def test_formal_saves():
    updates = save_updates(FORMAL_V1, first=0, last=46_875, evaluated=set(FORMAL_V1.bpb_updates()))
    assert updates == list(range(625, 46_876, 625)) and len(updates) == 75
    assert save_updates(TEST_V1, first=7, last=13, evaluated=set()) == [10, 13]


class FakeRows:
    """Row r of the run holds r * 1000 + 0, 1, 2; one update cannot be read."""

    def rows(self, update: int, start: int, stop: int) -> np.ndarray:
        if update == 4:
            raise DataError("train/rows_00000.bin: row 9 is damaged")
        numbers = np.arange(update * 8 + start, update * 8 + stop)[:, None] * 1000 + np.arange(3)
        return numbers.astype(np.uint16)


def test_feed_pads_hashes_and_reports():
    plan = plan_micro_batches(1, 3, 8, 2)
    assert plan.rows == range(2, 5)
    feed = RowFeed(FakeRows(), plan, context_tokens=2, first_update=2, last_update=6, device=torch.device("cpu"))
    batch = feed.take(2)
    rows = [18, 19, 20, 18]
    # Ids above 32,767 must survive the way through int16: row 20 of update 2 begins with 20,000.
    assert batch.ids_RT1.tolist() == [[row * 1000 % 65536 + column for column in range(3)] for row in rows]
    assert batch.weights_R.tolist() == [1, 1, 1, 0]
    hashes = [row_hash(np.array([row * 1000 + column for column in range(3)])) for row in rows[:3]]
    assert (batch.num_rows, batch.rows_hash) == (3, sum(hashes) % 2**64)
    assert feed.take(3).problem is None
    damaged = feed.take(4)
    assert damaged.problem == "train/rows_00000.bin: row 9 is damaged"
    assert (damaged.num_rows, damaged.rows_hash, damaged.weights_R.sum().item()) == (0, 0, 0)
    # Update 5 reads rows 42 to 44: ids from 42,000.
    assert feed.take(5).ids_RT1[0].tolist() == [42_000, 42_001, 42_002]
    feed.close()


def test_mfu_by_both_conventions():
    throughput = Throughput(4.643317008e9, 5.077215504e9, peak_flops("NVIDIA H200"), world_size=8)
    assert throughput.mfu(800_000) == pytest.approx(800_000 * 4.643317008e9 / (8 * 989e12))
    assert throughput.nominal_mfu(800_000) == pytest.approx(800_000 * 5.077215504e9 / (8 * 989e12))
    assert peak_flops("cpu") is None and peak_flops("NVIDIA GB200") == 2500e12
    assert [show_duration(seconds) for seconds in (45, 720, 12_240, 200_000)] == ["45 s", "12 min", "3.4 h", "2.3 d"]
