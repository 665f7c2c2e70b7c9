"""Bits per byte: worked values, special targets, and the same bits for any number of processes."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.errors import RunFailure
from nexttransformer.evaluation.bpb import BpbResult, bits_per_byte, row_sums, score_split

CPU = torch.device("cpu")
VOCAB = 97


class Rows:
    """Rows in memory."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.num_rows = len(rows)

    def read(self, indices: Any) -> np.ndarray:
        return self.rows[np.asarray(indices)]


def random_rows(num_rows: int = 7, num_tokens: int = 33) -> Rows:
    return Rows(np.random.default_rng(5).integers(0, VOCAB, (num_rows, num_tokens + 1)).astype(np.uint16))


LENGTHS = np.array([0, *(1 + i % 5 for i in range(VOCAB - 1))], dtype=np.int32)


class Small(torch.nn.Module):
    """A random two-layer model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(VOCAB, 48)
        self.head = torch.nn.Linear(48, VOCAB)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(ids_BT)))
        return functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(ids_BT)


def score(model: Any, rows: Rows, *, world_size: int = 1, micro_batch: int = 2, **options: Any) -> BpbResult:
    gathered: list[Any] = []
    result = None
    for rank in reversed(range(world_size)):

        def gather(own: Any, rank: int = rank) -> list[Any] | None:
            gathered.append(own)
            return gathered if rank == 0 else None

        result = score_split(
            model,
            rows,
            LENGTHS,
            split="val",
            device=CPU,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            gather=gather,
            **options,
        )
        assert rank == 0 or result is None
    assert result is not None
    return result


def test_worked_value() -> None:
    nats, num_bytes, counted = row_sums(
        np.array([[2.0, 0.5, 1.25, 3.0]], np.float32), np.array([[4, 1, 0, 5]], np.int32)
    )
    assert (nats[0].hex(), num_bytes[0], counted[0]) == ("0x1.6000000000000p+2", 10, 3)
    assert nats.dtype == np.float64 and num_bytes.dtype == np.int64
    assert bits_per_byte(5.5, 10) == 0.7934822724889299


def test_uniform_model() -> None:
    assert bits_per_byte(100 * math.log(32_768), 433) == pytest.approx(3.464203233256351, abs=1e-12)

    def uniform(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return torch.full(ids_BT.shape, math.log(VOCAB))

    rows = random_rows()
    result = score(uniform, rows)
    targets = rows.rows[:, 1:]
    assert result.tokens_counted == np.count_nonzero(targets)
    assert result.bytes == LENGTHS[targets].sum()
    expected = math.log2(VOCAB) * result.tokens_counted / result.bytes
    assert result.bpb == pytest.approx(expected, abs=1e-6)


def test_special_targets_count_in_neither_sum_even_with_nan_nats() -> None:
    rows = random_rows()
    rows.rows[2, 5:9] = 0
    model = Small()

    def poisoned(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return torch.where(targets_BT == 0, torch.nan, model(ids_BT, targets_BT))

    assert score(poisoned, rows) == score(model, rows)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_same_bits_for_any_number_of_processes(world_size: int) -> None:
    rows, model = random_rows(), Small()
    assert score(model, rows, world_size=world_size) == score(model, rows)


@pytest.mark.parametrize("micro_batch", [1, 3, 7, 16])
def test_other_micro_batches_differ_in_the_last_bits_only(micro_batch: int) -> None:
    rows, model = random_rows(), Small()
    one, other = score(model, rows), score(model, rows, micro_batch=micro_batch)
    assert (one.bytes, one.tokens_counted, one.rows) == (other.bytes, other.tokens_counted, other.rows)
    assert other.nats == pytest.approx(one.nats, rel=1e-6)


def test_every_pass_has_the_same_shape() -> None:
    shapes, model = [], Small()

    def watched(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        shapes.append(tuple(ids_BT.shape))
        return model(ids_BT, targets_BT)

    score(watched, random_rows(), micro_batch=4)
    assert shapes == [(4, 33)] * 2


def test_first_rows_only() -> None:
    rows, model = random_rows(), Small()
    assert score(model, rows, num_rows=4) == score(model, Rows(rows.rows[:4]))
    assert score(model, rows, num_rows=64).rows == 7


def test_a_row_without_a_finite_sum_is_named() -> None:
    model, rows = Small(), random_rows()
    # Id 90 occurs once, as an input of row 5.
    rows.rows[rows.rows == 90] = 1
    rows.rows[5, :2] = 90, 3

    def infinite(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return torch.where(ids_BT == 90, torch.inf, model(ids_BT, targets_BT))

    with pytest.raises(RunFailure, match=r"val: row 5 has a loss that is not finite \(1 such rows\)"):
        score(infinite, rows, world_size=2)


def test_a_failing_process_is_named_on_rank_0() -> None:
    def failing(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RunFailure, match=r"val: rank [01]: RuntimeError: no kernel"):
        score(failing, random_rows(), world_size=2)


def test_implausible_values_are_recognized() -> None:
    assert not BpbResult("val", 1, 1, 100, 100 * math.log(2) * 0.4).is_plausible
    assert BpbResult("val", 1, 1, 100, 100 * math.log(2) * 0.6).is_plausible
