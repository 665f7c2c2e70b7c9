"""`train.lock`: one launch per run folder, without clocks shared between hosts and without flock."""

from pathlib import Path

from nexttransformer.errors import CheckpointError, RunFailure


class LockHeld(CheckpointError):
    """Another launch is running on this folder (exit 2)."""


class LockLost(RunFailure):
    """The lock is no longer ours: another launch took over; nothing more may be written (exit 1)."""


class RunLock:
    """Held by rank 0. A daemon thread rewrites the counter. Use `acquire`, `check` before writing, `release`."""

    @classmethod
    def acquire(
        cls, path: Path, *, attempt: int, beat_seconds: float = 15.0, watch_seconds: float = 60.0
    ) -> "RunLock":
        """Creates the lock, taking over a dead one.

        Same host and process gone: taken over at once. Else watched for `watch_seconds`: a counter that stands
        still is taken over.

        Raises:
            LockHeld: the counter moves; names age and host hash.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Re-reads the token; raises LockLost if it is not ours. Call before every save and removal."""
        raise NotImplementedError

    def release(self) -> None:
        """Ends the thread and removes the lock if it is still ours. Never raises for a lost lock."""
        raise NotImplementedError
