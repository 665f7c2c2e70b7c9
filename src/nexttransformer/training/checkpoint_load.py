"""Choosing, loading and evaluating checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nexttransformer.training.checkpoint import OptimizerState
from nexttransformer.training.checkpoint_schema import CompleteMarker, ProtocolFile, TrainerState
from nexttransformer.training.collectives import Collectives
from nexttransformer.training.run_schema import RunRecord


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over. `message` is the line to print, `reason` an id for `checkpoint_skipped`:
    `incomplete`, `damaged`, `other_run`, `superseded`."""

    path: Path
    reason: str
    file: str | None
    message: str


@dataclass(frozen=True)
class Choice:
    """Where a launch starts: `path`, `marker`, `state` are None for update 0. `message` says it loudly."""

    path: Path | None
    marker: CompleteMarker | None
    state: TrainerState | None
    skipped: list[Skipped]
    message: str

    @property
    def update(self) -> int:
        """Updates already completed."""
        return 0 if self.state is None else self.state.update


def choose_checkpoint(
    root: Path,
    run: RunRecord,
    resume: str,
    collectives: Collectives,
    check_lock: Callable[[], None] = lambda: None,
) -> Choice:
    """Picks the newest complete checkpoint of this run, or the named one; collective, same result on all ranks.

    Rank 0 also tidies the folder, under the lock: leftover `.partial` folders are removed, a folder that has a
    marker but fails it is renamed to `rejected_checkpoint_%08d`, and when `resume` is a path, newer
    checkpoints of this folder are renamed alike (they are superseded).

    Args:
        root: the run folder.
        run: its `run.json`.
        resume: `auto`, `never` or a path.
        collectives: over a CPU group.
        check_lock: as in `save_checkpoint`.

    Raises:
        CheckpointError: a named checkpoint is incomplete, damaged or of another run; or any
            checkpoint of this run differs from the launch in mode, method, config, protocol, data or seed.
    """
    raise NotImplementedError


def load_checkpoint(
    choice: Choice, parameters: Mapping[str, Tensor], optimizer: OptimizerState, collectives: Collectives, host: str
) -> None:
    """Loads weights and optimizer state in place, by name, strictly both ways; collective.

    Afterwards `weights_digest` is checked on rank 0 and the device checksum is compared over ranks.

    Raises:
        CheckpointError: names, shapes or dtypes differ (all differences together), or a digest does.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class EvaluationCheckpoint:
    """All that an evaluation needs. `tensors` are CPU tensors by public name."""

    path: Path
    marker: CompleteMarker
    complete_digest: str
    model_config: dict[str, Any]
    protocol: ProtocolFile
    state: TrainerState
    tensors: dict[str, Tensor]


def load_for_evaluation(path: Path, collectives: Collectives | None = None) -> EvaluationCheckpoint:
    """Reads a checkpoint anywhere on disk: all sizes are checked, and the SHA-256 of every file that is read.

    Raises:
        CheckpointError: incomplete, damaged, or not a checkpoint; the file is named. Every rank raises or none.
    """
    raise NotImplementedError
