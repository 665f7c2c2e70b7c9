"""Saving a checkpoint: complete or not at all, whatever happens (atomic, several writers, marker last)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nexttransformer.errors import RunFailure
from nexttransformer.training.checkpoint_schema import CompleteMarker, ProtocolFile, TrainerState
from nexttransformer.training.collectives import Collectives


class SaveFailed(RunFailure):
    """This save failed and left nothing behind; older checkpoints are untouched. Training may go on.

    Raised on every rank with the same text. `reason` is an id for the `save_failed` event: `space`, `write`,
    `exists`, `folder_not_seen`.
    """

    def __init__(self, message: str, reason: str, file: str | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.file = file


class SaveRefused(RunFailure):
    """Saving would be wrong (non-finite weights, ranks differ, lock lost): the run must end. Same text on all ranks.

    `reason`: `nonfinite_weights`, `ranks_differ`, `lock_lost`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OptimizerState(Protocol):
    """What saving and loading need of the optimizer (see `optim.optimizer.Optimizer`)."""

    @property
    def num_updates_done(self) -> int: ...
    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what this rank must write, by `<parameter>::<state>`; each key on exactly one rank."""
        ...

    def expected_state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of every key of all ranks together."""
        ...

    def load_state(self, get: Callable[[str], Tensor]) -> None:
        """Takes what this rank needs; `get` returns a whole CPU tensor by key."""
        ...


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that exists. `num_bytes` without the marker; `seconds` from call to durable marker."""

    path: Path
    marker: CompleteMarker
    complete_digest: str
    num_bytes: int
    seconds: float


def expected_bytes(parameters: Mapping[str, Tensor], optimizer: OptimizerState) -> int:
    """Estimates the size of one checkpoint in bytes, headers and JSON files included; the same on every rank."""
    raise NotImplementedError


def save_checkpoint(
    root: Path,
    *,
    state: TrainerState,
    model_config: Mapping[str, Any],
    protocol: ProtocolFile,
    parameters: Mapping[str, Tensor],
    optimizer: OptimizerState,
    group_of: Mapping[str, str],
    collectives: Collectives,
    check_lock: Callable[[], None] = lambda: None,
    hook: Callable[[str], None] = lambda step: None,
) -> SavedCheckpoint:
    """Saves update `state.update` into `root/checkpoint_%08d`; collective, called by all ranks.

    The caller writes `checkpoint_saved`, `run_state.json` and applies retention afterwards (rank 0).

    Args:
        root: the run folder, the same on all ranks.
        state: everything besides tensors; equal on all ranks.
        model_config: the expanded config.
        protocol: id, digest and constants.
        parameters: every parameter by its public name; equal bits on all ranks.
        optimizer: its state tensors are written by the ranks that hold them.
        group_of: optimizer group of every parameter.
        collectives: over a CPU group.
        check_lock: rank 0 calls it before anything is written (`RunLock.check`).
        hook: called with a step's name after every file and step, for crash tests; may raise or kill.

    Returns:
        The same on every rank.

    Raises:
        SaveFailed: clean failure, on all ranks.
        SaveRefused: weights not finite, ranks differ (rank, host, tensor named) or lock lost, on all ranks.
    """
    raise NotImplementedError
