"""Stop requests: signals set a flag; a stop file and a time limit work where nobody can signal a worker."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

StopSource = Literal["SIGTERM", "SIGINT", "SIGUSR1", "stop_file", "time_limit"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequests:
    """Collects stop requests of this rank. `poll` once per update; its vote rides in the small reduction."""

    def __init__(self, stop_file: Path | None, stop_minutes: float | None) -> None:
        """Installs nothing yet.

        Args:
            stop_file: watched on rank 0; None elsewhere.
            stop_minutes: time limit on rank 0, counted from here; None for no limit.
        """
        self._stop_file = stop_file
        self._limit = None if stop_minutes is None else time.monotonic() + 60.0 * stop_minutes
        self._source: StopSource | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Installs handlers for SIGTERM, SIGINT and SIGUSR1 (main thread only). A second SIGINT ends at once."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def poll(self) -> StopSource | None:
        """Returns the first source seen, else None; one `stat` where a stop file is watched."""
        if self._source is None and self._stop_file is not None and self._stop_file.exists():
            self._source = "stop_file"
        if self._source is None and self._limit is not None and time.monotonic() >= self._limit:
            self._source = "time_limit"
        return self._source

    def clear_stop_file(self) -> None:
        """Removes the stop file of an earlier attempt (after `attempt_start`)."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Puts the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a flag: the update in progress is finished and saved by the loop.
        if self._source is None:
            self._source = cast(StopSource, signal.Signals(number).name)
        if number == signal.SIGINT:
            # The system's own action, which works even while Python waits inside a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
