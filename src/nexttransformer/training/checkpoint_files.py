"""Checkpoint folders: names, listing, verification, putting aside, removal."""

from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import CheckpointError
from nexttransformer.training.checkpoint_schema import CompleteMarker
from nexttransformer.training.collectives import Collectives

MODEL_FILE = "model.safetensors"
INDEX_FILE = "optimizer_index.json"
STATE_FILE = "trainer_state.json"
CONFIG_FILE = "model_config.json"
PROTOCOL_FILE = "protocol.json"
MARKER_FILE = "complete.json"


class IncompleteCheckpoint(CheckpointError):
    """The marker or a file it lists is missing."""


class DamagedCheckpoint(CheckpointError):
    """A file differs from what the marker says, or the marker itself is bad."""


def checkpoint_name(update: int) -> str:
    """Returns `checkpoint_%08d`."""
    raise NotImplementedError


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Lists folders named exactly `checkpoint_` + 8 digits as (update, path), newest first, by integer."""
    raise NotImplementedError


def read_marker(path: Path) -> CompleteMarker:
    """Reads a checkpoint's marker and compares names and sizes of all files, without hashing.

    Raises:
        IncompleteCheckpoint: `<folder> is incomplete (<file> missing).`
        DamagedCheckpoint: `<folder> is damaged (<file>: expected N bytes, got M).`
    """
    raise NotImplementedError


def verify_checkpoint(path: Path, collectives: Collectives) -> CompleteMarker:
    """Checks marker, names, sizes and the SHA-256 of every file, spread over ranks; collective.

    Every rank raises the same error or none does. Raises as `read_marker`.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class SpaceNeed:
    """Free-space arithmetic of a run: bytes needed, bytes free, the volume's path."""

    needed_bytes: int
    free_bytes: int
    volume: Path
