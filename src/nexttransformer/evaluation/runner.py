"""Runs CORE batches on a model: scores at span positions only, halving a batch that does not fit."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.evaluation.batches import Batch, BatchArrays, make_arrays
from nexttransformer.evaluation.decisions import SpanScores
from nexttransformer.evaluation.failures import describe
from nexttransformer.models.state import map_state

# Logits of so many positions exist at once: 268 MB in float32 for 32,768 ids.
HEAD_CHUNK_POSITIONS = 2048


class StatefulModel(Protocol):
    """What CORE asks of a model (`models.decoder.Decoder` gives it)."""

    def hidden(self, ids_BT: Tensor, *, state: Any = None, want_state: bool = False) -> tuple[Tensor, Any]:
        """Returns the head's input [B, T, D] and, if wanted, the state after the last token."""
        ...

    def head_logits(self, h: Tensor) -> Tensor:
        """Returns logits [..., V] of [..., D]; float32 from a real model."""
        ...


class BatchRunner:
    """Runs a list of batches, one launch ahead of the results so that the device never waits for the host.

    Attributes:
        num_split_batches: how often a batch had to be halved for lack of memory.
    """

    def __init__(self, model: StatefulModel, device: torch.device, *, pad_id: int, num_extra_columns: int = 0) -> None:
        self._model = model
        self._device = device
        self._pad_id = pad_id
        self._num_extra_columns = num_extra_columns
        self.num_split_batches = 0

    @torch.no_grad()
    def run(self, batches: list[Batch]) -> Iterator[tuple[Batch, SpanScores | str]]:
        """Yields every batch (or its halves) with its scores, or with one line that says why there are none."""
        waiting = list(reversed(batches))
        launched: tuple[Batch, BatchArrays, list[Tensor]] | None = None
        while waiting:
            batch = waiting.pop()
            arrays = make_arrays(batch, pad_id=self._pad_id, num_extra_columns=self._num_extra_columns)
            results, failure, is_full = None, "", False
            try:
                results = self._launch(arrays)
            except torch.OutOfMemoryError as problem:
                failure, is_full = describe(problem), True
            except Exception as problem:  # noqa: BLE001 - becomes the error of its tasks, and CORE is null
                failure = describe(problem)
            # Here, not in the handlers: there the traceback keeps the failed batch's tensors alive.
            if launched is not None:
                yield launched[0], _collect(launched[1], launched[2])
                launched = None
            if results is not None:
                launched = (batch, arrays, results)
            elif is_full and len(batch.questions) > 1:
                self.num_split_batches += 1
                waiting.extend(reversed(batch.halves()))
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                yield batch, failure
        if launched is not None:
            yield launched[0], _collect(launched[1], launched[2])

    def _place(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _launch(self, arrays: BatchArrays) -> list[Tensor]:
        """Starts a batch; returns [3, positions] tensors: nats, is-argmax and lead, still on the device."""
        model, state = self._model, None
        if arrays.prefix_ids is not None:
            owners = self._place(arrays.owners)
            _, state = model.hidden(self._place(arrays.prefix_ids), want_state=True)
            state = map_state(lambda tensor: tensor.index_select(0, owners), state)
        h_STD, _ = model.hidden(self._place(arrays.ids_ST), state=state)
        h_PD = h_STD.flatten(0, 1).index_select(0, self._place(arrays.positions))
        del h_STD, state
        targets, results = self._place(arrays.targets), []
        for start in range(0, len(arrays.positions), HEAD_CHUNK_POSITIONS):
            part = slice(start, start + HEAD_CHUNK_POSITIONS)
            results.append(
                _score(model.head_logits(h_PD[part]), targets[part], is_greedy=bool(arrays.is_greedy[part].any()))
            )
        return results


def _score(logits_PV: Tensor, targets_P: Tensor, *, is_greedy: bool) -> Tensor:
    """Returns [3, P]: nats, whether the target is the argmax (lowest id among equal maxima), lead of the best logit."""
    nats = functional.cross_entropy(logits_PV, targets_P, reduction="none")
    if not is_greedy:
        return torch.stack([nats, torch.zeros_like(nats), torch.zeros_like(nats)])
    top_P2 = logits_PV.topk(2, dim=-1).values
    ids_V = torch.arange(logits_PV.shape[-1], device=logits_PV.device)
    best_P = torch.where(logits_PV == top_P2[:, :1], ids_V, logits_PV.shape[-1]).amin(-1)
    return torch.stack([nats, (best_P == targets_P).to(nats.dtype), top_P2[:, 0] - top_P2[:, 1]])


def _collect(arrays: BatchArrays, results: list[Tensor]) -> SpanScores | str:
    """Copies a batch's results to the host, as float64; a late device failure comes back as text."""
    if not results:
        nothing = np.zeros(0)
        return SpanScores(arrays.segments, nothing, nothing > 0, nothing)
    try:
        nats, is_argmax, lead = torch.cat(results, dim=1).to("cpu", torch.float64).numpy()
    except Exception as problem:  # noqa: BLE001 - becomes the error of its tasks, and CORE is null
        return describe(problem)
    return SpanScores(arrays.segments, nats, is_argmax > 0, lead)
