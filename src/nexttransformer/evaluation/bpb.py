"""Bits per byte: exact sums of nats (float64) and raw bytes (int64), the same for any number of processes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nexttransformer.errors import RunFailure
from nexttransformer.evaluation.failures import describe
from nexttransformer.evaluation.progress import Progress

# Below this a model has seen the future, or the byte table is wrong.
IMPLAUSIBLE_BPB = 0.5


class Rows(Protocol):
    """Fixed packed rows (`data.loader.RowReader` gives them)."""

    @property
    def num_rows(self) -> int: ...

    def read(self, indices: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class BpbResult:
    """Sums over one split. `nats` is the `fsum` of one float64 sum per row, in row order."""

    split: str
    rows: int
    tokens_counted: int
    bytes: int
    nats: float

    @property
    def bpb(self) -> float:
        """Bits per byte: ratio of sums."""
        return bits_per_byte(self.nats, self.bytes)

    @property
    def is_plausible(self) -> bool:
        """Whether the value can come from a model that does not see what it predicts."""
        return self.bpb >= IMPLAUSIBLE_BPB


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Returns nats / (ln 2 x bytes)."""
    return nats / (math.log(2) * num_bytes)


def row_sums(nats_BT: np.ndarray, byte_lengths_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums each row over its counted targets, those whose byte length is above 0.

    Args:
        nats_BT: cross-entropy of each target; what stands at an uncounted target does not matter, not even NaN.
        byte_lengths_BT: raw bytes of each target.

    Returns:
        Per row: nats (float64), bytes (int64), counted targets (int64).
    """
    is_counted = byte_lengths_BT > 0
    nats = np.where(is_counted, nats_BT.astype(np.float64), 0.0)
    return nats.sum(axis=1), byte_lengths_BT.sum(axis=1, dtype=np.int64), is_counted.sum(axis=1, dtype=np.int64)


@dataclass(frozen=True)
class _RankSums:
    """One process's rows: indices, nats, bytes, counted targets; or the reason why there are none."""

    indices: np.ndarray
    nats: np.ndarray
    bytes: np.ndarray
    counted: np.ndarray
    failure: str | None = None


def score_split(
    model: Callable[[Tensor, Tensor], Tensor],
    reader: Rows,
    byte_lengths: np.ndarray,
    *,
    split: str,
    device: torch.device,
    micro_batch: int,
    rank: int,
    world_size: int,
    gather: Callable[[Any], list[Any] | None],
    num_rows: int | None = None,
    progress: Progress | None = None,
) -> BpbResult | None:
    """Scores a validation split. Every process calls it; the result is on rank 0, None elsewhere.

    Args:
        model: (ids_BT, targets_BT) -> nats_BT float32, in eval mode on `device`.
        reader: the split's rows of T + 1 ids.
        byte_lengths: raw bytes per id, 0 for special tokens.
        split: its name, for messages.
        device: where to run.
        micro_batch: rows per forward pass; every pass has this shape.
        rank, world_size: row i goes to process i mod world_size.
        gather: collects one object per process on rank 0 (None elsewhere).
        num_rows: only the first so many rows (smoke runs).
        progress: told about every finished pass.

    Raises:
        RunFailure: on rank 0, if a row has no finite sum or a process failed; it names split and row.
    """
    total = reader.num_rows if num_rows is None else min(num_rows, reader.num_rows)
    indices = np.arange(rank, total, world_size)
    if progress is not None:
        progress.start(len(indices), [split] * len(indices))
    try:
        parts = list(_score_rows(model, reader, byte_lengths, indices, micro_batch, device, progress, split))
        nothing = row_sums(np.zeros((0, 1)), np.zeros((0, 1), dtype=np.int32))
        nats, num_bytes, counted = (np.concatenate(sums) for sums in zip(nothing, *parts, strict=True))
        own = _RankSums(indices, nats, num_bytes, counted)
    except Exception as problem:  # noqa: BLE001 - told on rank 0 after the gather, so that no process waits in vain
        nothing = np.zeros(0)
        own = _RankSums(nothing, nothing, nothing, nothing, f"{split}: rank {rank}: {describe(problem)}")
    if progress is not None:
        progress.stop()
    gathered = gather(own)
    return None if gathered is None else _total(split, total, gathered)


def _score_rows(
    model: Callable[[Tensor, Tensor], Tensor],
    reader: Rows,
    byte_lengths: np.ndarray,
    indices: np.ndarray,
    micro_batch: int,
    device: torch.device,
    progress: Progress | None,
    split: str,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the row sums of each pass, copying results one pass behind the device."""
    launched: tuple[Tensor, np.ndarray, int] | None = None
    for start in [*range(0, len(indices), micro_batch), None]:
        following = None
        if start is not None:
            part = indices[start : start + micro_batch]
            # A short last pass repeats its first row: equal shapes give equal bits.
            rows = reader.read(np.concatenate([part, np.full(micro_batch - len(part), part[0])])).astype(np.int64)
            ids_BT, targets_BT = rows[:, :-1], rows[:, 1:]
            with torch.no_grad():
                nats_BT = model(torch.from_numpy(ids_BT).to(device), torch.from_numpy(targets_BT).to(device))
            following = (nats_BT, byte_lengths[targets_BT], len(part))
        if launched is not None:
            nats_BT, lengths_BT, count = launched
            yield row_sums(nats_BT.cpu().numpy()[:count], lengths_BT[:count])
            if progress is not None:
                progress.advance(count, [split] * count)
        launched = following


def _total(split: str, num_rows: int, gathered: list[_RankSums]) -> BpbResult:
    """Adds the row sums in row order, after checking that every row is there once and finite."""
    failures = [each.failure for each in gathered if each.failure is not None]
    if failures:
        raise RunFailure("\n".join(failures))
    indices = np.concatenate([each.indices for each in gathered])
    order = np.argsort(indices, kind="stable")
    if not np.array_equal(indices[order], np.arange(num_rows)):
        raise RunFailure(f"{split}: {len(indices)} rows came back, expected each of {num_rows} once.")
    nats = np.concatenate([each.nats for each in gathered])[order]
    bad = np.flatnonzero(~np.isfinite(nats))
    if len(bad):
        raise RunFailure(f"{split}: row {bad[0]} has a loss that is not finite ({len(bad)} such rows).")
    return BpbResult(
        split=split,
        rows=num_rows,
        tokens_counted=int(np.concatenate([each.counted for each in gathered]).sum()),
        bytes=int(np.concatenate([each.bytes for each in gathered]).sum()),
        nats=math.fsum(nats.tolist()),
    )
