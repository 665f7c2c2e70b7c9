"""What a run writes besides checkpoints: events, metrics, run state, trackers. Rank 0 only; no-ops elsewhere."""

from pathlib import Path
from typing import Any

from nexttransformer.errors import RunFailure
from nexttransformer.training.checkpoint_schema import CompleteMarker
from nexttransformer.training.events import EventKey, EventWriter, read_events
from nexttransformer.training.metrics import MetricsLine, MetricsWriter
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunState, Status
from nexttransformer.training.trackers import Trackers


def complete_log(folder: RunFolder, attempt: int, name: str, marker: CompleteMarker) -> None:
    """Writes the `checkpoint_saved` that an attempt killed right after its marker could not write any more.

    Rank 0, under the lock, before the new attempt starts; does nothing where the event is there.

    Args:
        folder: the run.
        attempt: the attempt before the new one.
        name, marker: the checkpoint that the new attempt continues from.
    """
    digest = marker.complete_digest
    saved = (event for event in read_events(folder.events).events if event.key == EventKey.CHECKPOINT_SAVED.value)
    if any(event.meta.get("complete_digest") == digest for event in saved):
        return
    meta = {
        "reason": "recovered",
        "complete_digest": digest,
        "weights_digest": marker.weights_digest,
        "tokens_seen": marker.tokens_seen,
        "data_chain": marker.data_chain,
        "bytes": marker.num_bytes,
        "seconds": 0.0,
    }
    writer = EventWriter(folder.events, attempt)
    writer.write(EventKey.CHECKPOINT_SAVED, name, meta, update=marker.update)
    writer.close()


class Journal:
    """Writer of one attempt. Create it under the lock, after `run.json` exists."""

    def __init__(self, folder: RunFolder, attempt: int, *, is_main: bool, trackers: Trackers | None = None) -> None:
        """Opens the logs for append on rank 0.

        Raises:
            CheckpointError: if a log was edited.
        """
        self.folder, self.attempt = folder, attempt
        self._is_main = is_main
        self._trackers = trackers
        self._newest_checkpoint: str | None = None
        self._num_without_progress = 0
        # Set once a line could not be written: metrics are evidence, so the run must stop.
        self.write_problem: str | None = None
        # The update of the last metrics line of this attempt.
        self.last_update = 0
        if is_main:
            previous = folder.read_state()
            self._num_without_progress = 1 + (previous.num_attempts_without_progress if previous else 0)
            self._events = EventWriter(folder.events, attempt)
            self._metrics = MetricsWriter(folder.metrics)

    def event(self, key: EventKey, value: Any, meta: dict[str, Any] | None = None, *, update: int) -> None:
        """Appends an event; a failure is kept in `write_problem`."""
        if self._is_main:
            try:
                self._events.write(key, value, meta, update=update)
            except RunFailure as error:
                self.write_problem = str(error)

    def metrics(self, line: MetricsLine) -> None:
        """Appends the line of an update and hands it to the trackers."""
        self.last_update = line.update
        if not self._is_main:
            return
        try:
            self._metrics.write(line)
        except RunFailure as error:
            self.write_problem = str(error)
        if self._trackers is not None:
            shown = ("loss_nats", "gradient_norm", "muon_momentum", "tokens_per_second", "mfu_fraction", "tokens_seen")
            values = {f"train/{key}": getattr(line, key) for key in shown if getattr(line, key) is not None}
            self._trackers.log(values, line.update)

    def track(self, values: dict[str, float], update: int) -> None:
        """Hands values (an evaluation's) to the trackers only."""
        if self._is_main and self._trackers is not None:
            self._trackers.log(values, update)

    def sync(self) -> None:
        """Makes the metrics durable (before every save)."""
        if self._is_main:
            try:
                self._metrics.sync()
            except RunFailure as error:
                self.write_problem = str(error)

    def checkpoint(self, path: Path, *, is_new: bool) -> None:
        """Notes the newest complete checkpoint; a new one is progress."""
        self._newest_checkpoint = path.name
        if is_new:
            self._num_without_progress = 0

    def state(self, status: Status, update: int, reason: str | None = None) -> None:
        """Replaces `run_state.json`; it is information only, so a failure is only noted."""
        if not self._is_main:
            return
        state = RunState(
            status=status,
            update=update,
            attempt=self.attempt,
            newest_checkpoint=self._newest_checkpoint,
            reason=reason,
            num_attempts_without_progress=self._num_without_progress,
        )
        try:
            self.folder.write_state(state)
        except OSError as error:
            self.write_problem = f"{self.folder.run_state_json}: cannot be written: {error.strerror}."

    @property
    def newest_checkpoint(self) -> str | None:
        """Folder name of the newest complete checkpoint, None while there is none."""
        return self._newest_checkpoint

    def close(self) -> None:
        """Closes files and trackers."""
        if not self._is_main:
            return
        if self._trackers is not None:
            self._trackers.close()
        self._events.close()
        try:
            self._metrics.close()
        except RunFailure as error:
            self.write_problem = str(error)
