"""Which checkpoints to keep, and whether there is room for more (rank 0 only)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Retention:
    """`keep` newest complete checkpoints (at least 1); every update divisible by `keep_every` (0: none extra)."""

    keep: int = 2
    keep_every: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for `--keep-checkpoints` below 1 or a negative `--keep-every`."""
        raise NotImplementedError


def apply_retention(
    root: Path, run_id: str, retention: Retention, *, newest: int, check_lock: Callable[[], None] = lambda: None
) -> list[Path]:
    """Removes what need not be kept: own folders only, older than `newest`, which was just completed.

    Marker first, fsync, then the rest. Half-removed older folders of this run are removed too.

    Returns:
        The folders removed, for `checkpoint_removed` events.
    """
    raise NotImplementedError


def check_space(root: Path, run_id: str, retention: Retention, *, checkpoint_bytes: int, saves_due: int) -> None:
    """Refuses a start without room: (kept + 1 - complete ones present, or `saves_due` if fewer) x size.

    Raises:
        CheckpointError: with needed and free bytes and the volume (exit 2).
    """
    raise NotImplementedError


def check_save_space(root: Path, checkpoint_bytes: int) -> str | None:
    """Returns None if 1.05 x `checkpoint_bytes` are free, else one line with needed, free and volume."""
    raise NotImplementedError
