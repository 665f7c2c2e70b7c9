"""Rows for the device: a thread reads the rows of the next updates, hashes and pins them."""

import queue
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nexttransformer.data.order import row_hashes, sum_hashes
from nexttransformer.errors import NextTransformerError
from nexttransformer.training.shares import MicroBatchPlan

_NUM_AHEAD = 2


class RowSource(Protocol):
    """What the feed needs of `data.loader.TrainingRows`."""

    def rows(self, update: int, start: int, stop: int) -> np.ndarray:
        """Returns rows start ... stop - 1 of an update (from 0), uint16 [n, T + 1]."""
        ...


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one update, on the device.

    Attributes:
        update: update about to be made, from 0.
        ids_RT1: token ids, int64 [micro-batches x B, T + 1]; the last rows may be padding.
        weights_R: float32, 1 for rows, 0 for padding.
        num_rows: rows that count.
        rows_hash: sum of their 64-bit hashes modulo 2^64, taken from the very buffer that was copied.
        problem: why the rows could not be read, else None; then all weights are 0.
    """

    update: int
    ids_RT1: Tensor
    weights_R: Tensor
    num_rows: int
    rows_hash: int
    problem: str | None = None


@dataclass(frozen=True)
class _HostBatch:
    update: int
    buffer_RT1: Tensor
    rows_hash: int
    problem: str | None


class RowFeed:
    """Reads ahead of the loop. Use `take` for consecutive updates, then `close`."""

    def __init__(
        self,
        source: RowSource,
        plan: MicroBatchPlan,
        *,
        context_tokens: int,
        first_update: int,
        last_update: int,
        device: torch.device,
    ) -> None:
        """Starts reading.

        Args:
            source: training rows.
            plan: this rank's share.
            context_tokens: T.
            first_update: first update to read, from 0.
            last_update: one more than the last.
            device: where batches go.
        """
        self._source, self._plan, self._device = source, plan, device
        self._row_tokens = context_tokens + 1
        num_rows = plan.num_micro_batches * plan.micro_batch
        self._weights_R = torch.zeros(num_rows, device=device)
        self._weights_R[: len(plan.rows)] = 1.0
        self._queue: queue.Queue[_HostBatch | BaseException] = queue.Queue(maxsize=_NUM_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(first_update, last_update), name="row-feed", daemon=True
        )
        self._thread.start()

    def take(self, update: int) -> Batch:
        """Returns the batch of the next update, its copy to the device under way."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        assert item.update == update, f"asked for update {update}, next is {item.update}"
        # uint16 arithmetic is missing on some devices: the bits travel as int16.
        ids_RT1 = item.buffer_RT1.to(self._device, non_blocking=True).to(torch.int64) & 0xFFFF
        if item.problem is not None:
            return Batch(update, ids_RT1, torch.zeros_like(self._weights_R), 0, 0, item.problem)
        return Batch(update, ids_RT1, self._weights_R, len(self._plan.rows), item.rows_hash)

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed.set()
        while self._thread.is_alive():
            # The thread may be waiting for room.
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue
        self._thread.join()

    def _run(self, first_update: int, last_update: int) -> None:
        try:
            for update in range(first_update, last_update):
                self._put(self._read(update))
                if self._is_closed.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - handed to `take`, which raises it
            self._put(error)

    def _put(self, item: "_HostBatch | BaseException") -> None:
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _read(self, update: int) -> _HostBatch:
        num_rows = self._plan.num_micro_batches * self._plan.micro_batch
        # Pinned memory comes from torch's cache, which waits for pending copies before it reuses a block.
        buffer_RT1 = torch.zeros(
            (num_rows, self._row_tokens), dtype=torch.int16, pin_memory=self._device.type == "cuda"
        )
        view_RT1 = buffer_RT1.numpy().view(np.uint16)
        share = self._plan.rows
        try:
            view_RT1[: len(share)] = self._source.rows(update, share.start, share.stop)
        except NextTransformerError as error:
            return _HostBatch(update, buffer_RT1, 0, str(error))
        view_RT1[len(share) :] = view_RT1[0]
        return _HostBatch(update, buffer_RT1, sum_hashes(row_hashes(view_RT1[: len(share)])), None)
