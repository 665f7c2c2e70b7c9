"""Which checkpoints to keep, and whether there is room for more (rank 0 only)."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import CheckpointError, ConfigError
from nexttransformer.training import checkpoint_files as files

# A save needs this much more than its estimate: file systems round up and other files grow.
_SPACE_MARGIN = 1.05


@dataclass(frozen=True)
class Retention:
    """`keep` newest complete checkpoints (at least 1); every update divisible by `keep_every` (0: none extra)."""

    keep: int = 2
    keep_every: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for `--keep-checkpoints` below 1 or a negative `--keep-every`."""
        if self.keep < 1:
            raise ConfigError(
                f"--keep-checkpoints {self.keep}: expected a whole number from 1; the newest always stays."
            )
        if self.keep_every < 0:
            raise ConfigError(f"--keep-every {self.keep_every}: expected a whole number from 0 (0: keep none extra).")


def list_complete(root: Path, run_id: str) -> list[tuple[int, Path]]:
    """Lists this run's checkpoints with a valid marker and all sizes right, newest first; nothing is hashed."""
    found = []
    for update, path in files.list_checkpoints(root):
        try:
            marker = files.read_marker(path)
        except files.UnusableCheckpoint:
            continue
        if marker.run_id == run_id and marker.update == update:
            found.append((update, path))
    return found


def apply_retention(
    root: Path, run_id: str, retention: Retention, *, newest: int, check_lock: Callable[[], None] = lambda: None
) -> list[Path]:
    """Removes what need not be kept: own folders only, older than `newest`, which was just completed.

    Marker first, fsync, then the rest. Older folders of this run without a marker (half removed, or a
    save that was interrupted) are removed too; damaged ones are left for the resume to put aside.

    Args:
        root: the run folder.
        run_id: whose folders.
        retention: what to keep.
        newest: update of the checkpoint that was just completed.
        check_lock: called before each removal.

    Returns:
        The folders removed, for `checkpoint_removed` events.

    Raises:
        CheckpointError: `newest` is not there complete, so nothing may be removed; or a removal fails.
    """
    complete = list_complete(root, run_id)
    if newest not in [update for update, _ in complete]:
        raise CheckpointError(f"{root / files.checkpoint_name(newest)} is not complete; nothing older is removed.")
    older = [(update, path) for update, path in complete if update < newest]
    doomed = [
        path
        for update, path in older[retention.keep - 1 :]
        if not (retention.keep_every and update % retention.keep_every == 0)
    ]
    doomed += [
        path
        for update, path in files.list_checkpoints(root)
        if update < newest and not (path / files.MARKER_FILE).exists() and files.is_own(path, run_id)
    ]
    removed = []
    for path in doomed:
        check_lock()
        try:
            files.remove_checkpoint(path)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be removed: {problem.strerror}.") from None
        removed.append(path)
    return removed


def check_space(root: Path, run_id: str, retention: Retention, *, checkpoint_bytes: int, saves_due: int) -> None:
    """Refuses a start without room: (kept + 1 - complete ones present, or `saves_due` if fewer) x size.

    Args:
        root: the run folder; it or its nearest existing parent tells the volume.
        run_id: whose checkpoints count as present.
        retention: what will be kept.
        checkpoint_bytes: expected size of one checkpoint.
        saves_due: number of saves until the end of the run.

    Raises:
        CheckpointError: with needed and free bytes and the volume (exit 2).
    """
    present = len(list_complete(root, run_id))
    num_due = min(max(retention.keep + 1 - present, 1), saves_due)
    needed = num_due * checkpoint_bytes
    volume, free = _volume_and_free(root)
    if free < needed:
        raise CheckpointError(
            f"{root}: too little space for {num_due} checkpoints of {checkpoint_bytes:,} bytes: needed {needed:,} "
            f"bytes, free {free:,} bytes on {volume}. Free some, lower --keep-checkpoints or use another --output."
        )


def check_save_space(root: Path, checkpoint_bytes: int) -> str | None:
    """Returns None if 1.05 x `checkpoint_bytes` are free, else one line with needed, free and volume."""
    needed = int(checkpoint_bytes * _SPACE_MARGIN)
    volume, free = _volume_and_free(root)
    return None if free >= needed else f"needed {needed:,} bytes, free {free:,} bytes on {volume}."


def _volume_and_free(root: Path) -> tuple[Path, int]:
    """Returns the mount point that holds `root`, and its free bytes."""
    place = root.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return place, free
