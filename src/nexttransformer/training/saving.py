"""When a run saves and what happens when a save fails; the file work is in `checkpoint.py`."""

import time
from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from nexttransformer.errors import CheckpointError, RunFailure
from nexttransformer.protocol import Protocol
from nexttransformer.training.checkpoint import SavedCheckpoint, SaveFailed, SaveRefused, save_checkpoint
from nexttransformer.training.checkpoint_schema import ProtocolFile, TrainerState
from nexttransformer.training.collectives import on_rank0
from nexttransformer.training.distributed import World
from nexttransformer.training.events import EventKey
from nexttransformer.training.journal import Journal
from nexttransformer.training.lock import RunLock
from nexttransformer.training.optimizer_index import OptimizerState
from nexttransformer.training.retention import Retention, apply_retention
from nexttransformer.training.run_schema import RunRecord

SaveReason = Literal["scheduled", "time", "stop", "final"]


def save_updates(protocol: Protocol, *, first: int, last: int, evaluated: set[int]) -> list[int]:
    """Returns the completed updates after `first` at which a run certainly saves.

    Every `save_every_updates`, wherever an evaluation needs saved weights, and the last one.
    """
    step = protocol.save_every_updates
    scheduled = {*range(step, last + 1, step), *evaluated, last}
    return sorted(update for update in scheduled if first < update <= last)


class Saver:
    """Saves checkpoints of one attempt and keeps their number down. Every method is collective.

    Attributes:
        newest: the newest checkpoint this attempt saved, None before the first.
        seconds: duration of the last save, None before the first.
        last_time: monotonic time of the last save, or of the attempt's start.
    """

    def __init__(
        self,
        world: World,
        record: RunRecord,
        journal: Journal,
        lock: RunLock | None,
        retention: Retention,
        *,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerState,
        group_of: Mapping[str, str],
        hook: Callable[[str], None],
    ) -> None:
        """`lock` is rank 0's, None elsewhere; `hook` is called after every step of a save (crash tests)."""
        self._world, self._record, self._journal, self._lock = world, record, journal, lock
        self._retention, self._parameters, self._optimizer = retention, parameters, optimizer
        self._group_of, self._hook = group_of, hook
        self._has_older = journal.newest_checkpoint is not None
        self._num_failed_in_a_row = 0
        self.newest: SavedCheckpoint | None = None
        self.seconds: float | None = None
        self.last_time = time.monotonic()

    def save(self, state: TrainerState, reason: SaveReason, *, must_succeed: bool) -> SavedCheckpoint | None:
        """Saves and applies retention.

        Args:
            state: everything besides tensors.
            reason: why, for the event.
            must_succeed: stop and final saves, and those that a preset evaluation needs: retried for some
                minutes. Other saves may fail once while an older complete checkpoint exists.

        Returns:
            The checkpoint, on every rank; None if this save failed and training may go on.

        Raises:
            RunFailure: the run must end; the message says what is still safe.
        """
        self._journal.sync()
        limits = self._world.limits
        num_tries = 1 + (limits.num_final_save_retries if must_succeed else 0)
        for number in range(num_tries):
            try:
                saved = self._save_once(state)
            except SaveFailed as error:
                self._note_failure(state, error)
                may_go_on = not must_succeed and self._has_older and self._num_failed_in_a_row < 2
                if may_go_on:
                    return None
                if number + 1 == num_tries:
                    raise RunFailure(f"{error} {self._what_is_safe()}") from None
                time.sleep(limits.retry_final_save)
            except SaveRefused as error:
                meta = {"reason": error.reason, "file": None}
                name = self._journal.folder.checkpoint(state.update).name
                if error.reason != "lock_lost":
                    self._journal.event(EventKey.SAVE_FAILED, name, meta, update=state.update)
                raise
            else:
                self._note_success(saved, reason)
                return saved
        raise AssertionError("a save returns or raises")

    def _save_once(self, state: TrainerState) -> SavedCheckpoint:
        record = self._record
        return save_checkpoint(
            self._journal.folder.root,
            state=state,
            model_config=record.config,
            protocol=ProtocolFile(
                id=record.protocol.id, digest=record.protocol.digest, constants=record.protocol.constants
            ),
            parameters=self._parameters,
            optimizer=self._optimizer,
            group_of=self._group_of,
            collectives=self._world.control,
            check_lock=self._check_lock,
            hook=self._hook,
        )

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _note_failure(self, state: TrainerState, error: SaveFailed) -> None:
        self._num_failed_in_a_row += 1
        name = self._journal.folder.checkpoint(state.update).name
        self._journal.event(
            EventKey.SAVE_FAILED, name, {"reason": error.reason, "file": error.file}, update=state.update
        )
        if self._world.is_main:
            print(f"{error} {self._what_is_safe()}", flush=True)

    def _what_is_safe(self) -> str:
        newest = self._journal.newest_checkpoint
        return f"Still safe: {newest}." if newest else "No complete checkpoint exists yet."

    def _note_success(self, saved: SavedCheckpoint, reason: SaveReason) -> None:
        self._num_failed_in_a_row, self._has_older = 0, True
        self.newest, self.seconds, self.last_time = saved, saved.seconds, time.monotonic()
        marker, journal = saved.marker, self._journal
        meta = {
            "reason": reason,
            "complete_digest": saved.complete_digest,
            "weights_digest": marker.weights_digest,
            "tokens_seen": marker.tokens_seen,
            "data_chain": marker.data_chain,
            "bytes": saved.num_bytes,
            "seconds": saved.seconds,
        }
        journal.event(EventKey.CHECKPOINT_SAVED, saved.path.name, meta, update=marker.update)
        journal.checkpoint(saved.path, is_new=True)
        journal.state("running", marker.update)

        def remove_old() -> None:
            root, run_id = journal.folder.root, marker.run_id
            try:
                removed = apply_retention(
                    root, run_id, self._retention, newest=marker.update, check_lock=self._check_lock
                )
            except CheckpointError as error:
                # Too many checkpoints are no danger; the next save tries again.
                print(f"{error} Old checkpoints stay for now.", flush=True)
                return
            for path in removed:
                journal.event(
                    EventKey.CHECKPOINT_REMOVED, path.name, {"reason": "retention", "file": None}, update=marker.update
                )

        on_rank0(remove_old, self._world.control)
