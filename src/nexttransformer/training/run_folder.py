"""The run folder: where its files are, and which launches it refuses."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nexttransformer.training.run_schema import RunRecord, RunState

EvaluationKind = Literal["val_curve", "core", "final"]


def new_run_id() -> str:
    """Returns 16 random hex digits."""
    raise NotImplementedError


def utc_now() -> str:
    """Returns the time as UTC ISO 8601 with milliseconds, as `2026-01-31T12:00:00.123Z`."""
    raise NotImplementedError


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run and its small files. Only rank 0 writes."""

    root: Path

    @property
    def run_json(self) -> Path: ...
    @property
    def run_state_json(self) -> Path: ...
    @property
    def events(self) -> Path: ...
    @property
    def metrics(self) -> Path: ...
    @property
    def lock(self) -> Path: ...
    @property
    def stop_file(self) -> Path: ...
    @property
    def evaluations(self) -> Path: ...
    @property
    def logs(self) -> Path: ...

    def evaluation(self, kind: EvaluationKind, update: int) -> Path:
        """Returns `evaluations/val_curve_%08d.json`, `core_%08d.json` or `final.json`."""
        raise NotImplementedError

    def checkpoint(self, update: int) -> Path:
        """Returns `checkpoint_%08d` of that number of completed updates."""
        raise NotImplementedError

    def create(self, record: RunRecord) -> None:
        """Makes the folders and writes `run.json` once, atomically.

        Raises:
            CheckpointError: if `run.json` exists already or the folder cannot be written.
        """
        raise NotImplementedError

    def read_record(self) -> RunRecord | None:
        """Reads `run.json`; None where there is none; CheckpointError naming every problem where it is bad."""
        raise NotImplementedError

    def write_state(self, state: RunState) -> None:
        """Replaces `run_state.json` atomically."""
        raise NotImplementedError

    def read_state(self) -> RunState | None:
        """Reads `run_state.json`; None where there is none or it is unreadable (it is information only)."""
        raise NotImplementedError

    def evaluation_is_due(self, kind: EvaluationKind, update: int, weights_digest: str) -> bool:
        """Says whether that evaluation's file is missing, unreadable or of other weights."""
        raise NotImplementedError


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch on a run folder may do.

    `record` is the folder's `run.json`, or the candidate where the folder is new. `attempt` counts
    from 0. `finished_line` is set when the run has ended: print it, write nothing, exit 0. Each
    warning is one line to print and log.
    """

    record: RunRecord
    is_new: bool
    attempt: int
    finished_line: str | None
    warnings: list[str]


def plan_launch(folder: RunFolder, candidate: RunRecord, resume: str) -> LaunchPlan:
    """Decides what this launch may do; reads only. Call it before and again under the lock.

    Args:
        folder: the output folder, present or not.
        candidate: the record this launch would write as attempt 0 (fresh run_id and time).
        resume: `auto`, `never` or the path of a checkpoint folder.

    `never` refuses a folder that holds anything. A path must be a complete checkpoint (checked by
    `checkpoint_choice.choose_checkpoint`); with a path into another folder and a new output folder
    the record takes over the checkpoint's run_id, so a moved run goes on as the same run.

    Raises:
        CheckpointError: naming every difference (mode, method, config key, protocol, data, seed,
            number of updates, smoke updates, and in formal runs code, with the changed files) between
            the launch and the folder. A smoke folder never becomes formal or open. Exit code 2.
    """
    raise NotImplementedError
