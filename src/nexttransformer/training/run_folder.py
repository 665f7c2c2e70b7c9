"""The run folder: where its files are, and its small files."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, NextTransformerError
from nexttransformer.training.run_schema import RunRecord, RunState
from nexttransformer.training.tuning_document import TUNING_FILE

EvaluationKind = Literal["val_curve", "core", "final"]


def new_run_id() -> str:
    """Returns 16 random hex digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run and its small files. Only rank 0 writes."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Written once by attempt 0."""
        return self.root / "run.json"

    @property
    def run_state_json(self) -> Path:
        """Replaced at every change of state."""
        return self.root / "run_state.json"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per update."""
        return self.root / "metrics.jsonl"

    @property
    def kernel_tuning(self) -> Path:
        """The tiles of fla-core's kernels in use; on a GPU, where the method has such kernels."""
        return self.root / TUNING_FILE

    @property
    def lock(self) -> Path:
        """Present while a launch is running."""
        return self.root / "train.lock"

    @property
    def stop_file(self) -> Path:
        """Creating it asks the run to stop after the current update."""
        return self.root / "stop_requested"

    @property
    def evaluations(self) -> Path:
        """Preset evaluations."""
        return self.root / "evaluations"

    @property
    def logs(self) -> Path:
        """Launcher output and dumps."""
        return self.root / "logs"

    def evaluation(self, kind: EvaluationKind, update: int) -> Path:
        """Returns `evaluations/val_curve_%08d.json`, `core_%08d.json` or `final.json`."""
        return self.evaluations / ("final.json" if kind == "final" else f"{kind}_{update:08d}.json")

    def checkpoint(self, update: int) -> Path:
        """Returns `checkpoint_%08d` of that number of completed updates."""
        return self.root / f"checkpoint_{update:08d}"

    def create(self, record: RunRecord) -> None:
        """Makes the folders and writes `run.json` once, atomically.

        Raises:
            CheckpointError: if `run.json` exists already or the folder cannot be written.
        """
        if self.run_json.exists():
            raise CheckpointError(f"{self.run_json} exists already; it is written once and never changed.")
        try:
            self.evaluations.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            jsonio.write_json_atomic(self.run_json, record.to_json())
        except OSError as problem:
            raise CheckpointError(
                f"{self.root}: cannot be written: {problem.strerror}. Use another --output."
            ) from None

    def read_record(self) -> RunRecord | None:
        """Reads `run.json`; None where there is none; CheckpointError naming every problem where it is bad."""
        return RunRecord.read(self.run_json) if self.run_json.exists() else None

    def write_state(self, state: RunState) -> None:
        """Replaces `run_state.json` atomically."""
        jsonio.write_json_atomic(self.run_state_json, state.to_json())

    def read_state(self) -> RunState | None:
        """Reads `run_state.json`; None where there is none or it is unreadable (it is information only)."""
        try:
            return RunState.read(self.run_state_json)
        except NextTransformerError:
            return None

    def evaluation_is_due(self, kind: EvaluationKind, update: int, weights_digest: str) -> bool:
        """Says whether that evaluation's file is missing, unreadable or of other weights."""
        try:
            value = jsonio.read_json(self.evaluation(kind, update))
        except NextTransformerError:
            return True
        checkpoint = value.get("checkpoint") if isinstance(value, dict) else None
        return not isinstance(checkpoint, dict) or checkpoint.get("weights_digest") != weights_digest
