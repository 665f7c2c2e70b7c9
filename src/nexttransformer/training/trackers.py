"""Optional run trackers (wandb, tensorboard, trackio): a copy of the local metrics, allowed to fail.

Each tracker works in a thread of its own behind a bounded queue: a slow or dead service never blocks
training, and its errors become one warning. The local files stay the truth.
"""

import importlib
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

_QUEUE_LENGTH = 1024
_CLOSE_SECONDS = 10.0


class Tracker(Protocol):
    """A service that takes numbers of an update."""

    def log(self, values: dict[str, float], update: int) -> None:
        """Sends values of a completed update."""
        ...

    def close(self) -> None:
        """Flushes and ends."""
        ...


class WandbTracker:
    """Weights & Biases; continues the run of the same id after a resume."""

    def __init__(self, project: str, run_id: str, name: str, config: dict[str, Any], folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, id=run_id, name=name, config=config, dir=str(folder), resume="allow")

    def log(self, values: dict[str, float], update: int) -> None:
        """Logs at the update."""
        self._run.log(values, step=update)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class TensorboardTracker:
    """TensorBoard event files under `logs/tensorboard` of the run folder."""

    def __init__(self, project: str, run_id: str, name: str, config: dict[str, Any], folder: Path) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], update: int) -> None:
        """Writes one scalar a value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, update)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class TrackioTracker:
    """Trackio, which keeps a local database."""

    def __init__(self, project: str, run_id: str, name: str, config: dict[str, Any], folder: Path) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=project, name=f"{name}-{run_id}", config=config, resume="allow")

    def log(self, values: dict[str, float], update: int) -> None:
        """Logs at the update."""
        self._trackio.log(values, step=update)

    def close(self) -> None:
        """Ends the run."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
}


class _TrackerThread:
    """Runs one tracker; after its first error it is dropped with one warning."""

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self._name, self._build = name, build
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(maxsize=_QUEUE_LENGTH)
        self.is_failed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, float], update: int) -> None:
        if self.is_failed:
            return
        try:
            self._queue.put_nowait((values, update))
        except queue.Full:
            self._fail("it does not keep up")

    def close(self) -> None:
        if not self.is_failed:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                self._fail("it does not keep up")
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            tracker = self._build()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        # A foreign service may raise anything, SystemExit included.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, and training goes on by design
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self.is_failed:
            self.is_failed = True
            line = reason.splitlines()[0][:200] if reason else "no reason given"
            print(f"tracker {self._name} switched off ({line}). Training goes on.", file=sys.stderr, flush=True)


class Trackers:
    """All trackers the site asks for; rank 0 only."""

    def __init__(
        self, names: list[str], *, project: str, run_id: str, name: str, config: dict[str, Any], folder: Path
    ) -> None:
        """Starts each tracker in its own thread; a missing package is a warning.

        Args:
            names: keys of TRACKERS.
            project: project name for the services.
            run_id: the run's id.
            name: shown name of the run.
            config: small JSON settings shown with the run.
            folder: where trackers may write local files.
        """
        arguments = (project, run_id, name, config, folder)
        self._threads = [_TrackerThread(key, lambda kind=TRACKERS[key]: kind(*arguments)) for key in names]

    def log(self, values: dict[str, float], update: int) -> None:
        """Hands values of a completed update to every tracker; never waits."""
        for thread in self._threads:
            thread.log(values, update)

    def close(self) -> None:
        """Flushes, waiting at most ten seconds for each tracker."""
        for thread in self._threads:
            thread.close()
