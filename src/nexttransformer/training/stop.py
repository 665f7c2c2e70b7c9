"""Stop requests: signals set a flag; a stop file and a time limit work where nobody can signal a worker."""

from pathlib import Path
from typing import Literal

StopSource = Literal["SIGTERM", "SIGINT", "SIGUSR1", "stop_file", "time_limit"]


class StopRequests:
    """Collects stop requests of this rank. `poll` once per update; its vote rides in the small reduction."""

    def __init__(self, stop_file: Path | None, stop_minutes: float | None) -> None:
        """Nothing is installed yet. Ranks other than 0 pass None twice; the time counts from here."""
        raise NotImplementedError

    def install(self) -> None:
        """Installs handlers for SIGTERM, SIGINT and SIGUSR1 (main thread only). A second SIGINT ends at once."""
        raise NotImplementedError

    def poll(self) -> StopSource | None:
        """Returns the first source seen, else None; one `stat` where a stop file is watched."""
        raise NotImplementedError

    def clear_stop_file(self) -> None:
        """Removes the stop file of an earlier attempt (after `attempt_start`)."""
        raise NotImplementedError

    def restore(self) -> None:
        """Puts the previous handlers back."""
        raise NotImplementedError
