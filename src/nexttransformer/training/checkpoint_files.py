"""Checkpoint folders: names, listing, verification, putting aside, removal."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, NextTransformerError
from nexttransformer.training.checkpoint_schema import CompleteMarker, FileEntry
from nexttransformer.training.collectives import Collectives, on_all_ranks, on_rank0

MODEL_FILE = "model.safetensors"
INDEX_FILE = "optimizer_index.json"
STATE_FILE = "trainer_state.json"
CONFIG_FILE = "model_config.json"
PROTOCOL_FILE = "protocol.json"
MARKER_FILE = "complete.json"
JSON_FILES = (INDEX_FILE, STATE_FILE, CONFIG_FILE, PROTOCOL_FILE)

_NAME = re.compile(r"checkpoint_(\d{8})")
_PARTIAL = re.compile(r"checkpoint_\d{8}\.partial")


class UnusableCheckpoint(CheckpointError):
    """A folder that this run cannot use; `file` names what is wrong in it. Picklable, as it crosses ranks."""

    reason = "unusable"

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class IncompleteCheckpoint(UnusableCheckpoint):
    """The marker or a file it lists is missing."""

    reason = "incomplete"


class DamagedCheckpoint(UnusableCheckpoint):
    """A file differs from what the marker says, or the marker itself is bad."""

    reason = "damaged"


class ForeignCheckpoint(UnusableCheckpoint):
    """A whole checkpoint, but of another run."""

    reason = "other_run"


def incomplete(path: Path, file: str) -> IncompleteCheckpoint:
    """Returns the error for a missing file."""
    return IncompleteCheckpoint(f"{path} is incomplete ({file} missing).", file)


def damaged(path: Path, file: str, what: str) -> DamagedCheckpoint:
    """Returns the error for a file that is not what it should be."""
    return DamagedCheckpoint(f"{path} is damaged ({file}: {what}).", file)


def checkpoint_name(update: int) -> str:
    """Returns `checkpoint_%08d`."""
    return f"checkpoint_{update:08d}"


def update_of(path: Path) -> int | None:
    """Returns the update in a folder's name, None for any name but `checkpoint_` + 8 digits."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def optimizer_file(writer: int, num_writers: int) -> str:
    """Returns the name of the file that the writer of that number (from 0) writes."""
    return f"optimizer_{writer:05d}_of_{num_writers:05d}.safetensors"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Lists folders named exactly `checkpoint_` + 8 digits as (update, path), newest first, by integer."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        update = update_of(path)
        if update is not None and path.is_dir() and not path.is_symlink():
            found.append((update, path))
    return sorted(found, reverse=True)


def read_marker(path: Path) -> CompleteMarker:
    """Reads a checkpoint's marker and compares names and sizes of all files, without hashing.

    Raises:
        CheckpointError: there is no such folder.
        IncompleteCheckpoint: `<folder> is incomplete (<file> missing).`
        DamagedCheckpoint: `<folder> is damaged (<file>: expected N bytes, found M).`
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint folder.")
    if not (path / MARKER_FILE).exists():
        raise incomplete(path, MARKER_FILE)
    try:
        marker = CompleteMarker.read(path / MARKER_FILE)
    except CheckpointError as problem:
        raise damaged(path, MARKER_FILE, str(problem).splitlines()[0].rstrip(".")) from None
    listed = {entry.path for entry in marker.files}
    for name in (MODEL_FILE, *JSON_FILES):
        if name not in listed:
            raise damaged(path, MARKER_FILE, f"does not list {name}")
    for entry in marker.files:
        if Path(entry.path).name != entry.path:
            raise damaged(path, MARKER_FILE, f"lists {entry.path!r}, expected a plain file name")
        file = path / entry.path
        if not file.is_file():
            raise incomplete(path, entry.path)
        if file.stat().st_size != entry.bytes:
            raise damaged(path, entry.path, f"expected {entry.bytes} bytes, found {file.stat().st_size}")
    return marker


def verify_files(path: Path, entries: list[FileEntry], *, num_threads: int = 4) -> None:
    """Hashes files of a checkpoint and compares; raises DamagedCheckpoint with the first that differs."""
    with ThreadPoolExecutor(num_threads) as pool:
        digests = pool.map(lambda entry: _digest_or_reason(path / entry.path), entries)
        for entry, digest in zip(entries, digests, strict=True):
            if digest != entry.sha256:
                raise damaged(path, entry.path, f"expected SHA-256 {entry.sha256[:16]}..., found {digest[:16]}")


def verify_checkpoint(path: Path, collectives: Collectives) -> CompleteMarker:
    """Checks marker, names, sizes and the SHA-256 of every file, spread over ranks; collective.

    Every rank raises the same error or none does. Raises as `read_marker`.
    """
    marker = on_rank0(lambda: read_marker(path), collectives)
    share = spread_files(marker.files, collectives.world_size)[collectives.rank]
    on_all_ranks(lambda: verify_files(path, share), collectives)
    return marker


def spread_files(entries: list[FileEntry], num_ranks: int) -> list[list[FileEntry]]:
    """Returns a list of files for each rank, largest first to the rank with the fewest bytes."""
    shares: list[list[FileEntry]] = [[] for _ in range(num_ranks)]
    for entry in sorted(entries, key=lambda entry: (-entry.bytes, entry.path)):
        min(shares, key=lambda share: sum(other.bytes for other in share)).append(entry)
    return shares


def is_own(path: Path, run_id: str) -> bool:
    """Says whether a checkpoint folder carries this run_id (in its marker, else in its trainer state)."""
    for name in (MARKER_FILE, STATE_FILE):
        try:
            value = jsonio.read_json(path / name)
        except NextTransformerError:
            continue
        if isinstance(value, dict):
            return value.get("run_id") == run_id
    return False


def remove_checkpoint(path: Path) -> None:
    """Removes a folder: marker first and durably, the trainer state (which tells whose it is) last."""
    (path / MARKER_FILE).unlink(missing_ok=True)
    jsonio.fsync_folder(path)
    for file in sorted(path.iterdir()):
        if file.name != STATE_FILE and not file.is_dir():
            file.unlink()
    shutil.rmtree(path)
    jsonio.fsync_folder(path.parent)


def remove_partials(root: Path) -> list[Path]:
    """Removes `checkpoint_%08d.partial` folders left by interrupted saves; returns them."""
    found = [path for path in root.iterdir() if _PARTIAL.fullmatch(path.name) and path.is_dir()]
    for path in found:
        shutil.rmtree(path)
    if found:
        jsonio.fsync_folder(root)
    return found


def put_aside(path: Path) -> Path:
    """Renames `checkpoint_N` to `rejected_checkpoint_N`, so that its name is free; an older one of that name goes."""
    target = path.with_name(f"rejected_{path.name}")
    if target.exists():
        shutil.rmtree(target)
    os.rename(path, target)
    jsonio.fsync_folder(path.parent)
    return target


def _digest_or_reason(path: Path) -> str:
    try:
        return jsonio.file_digest(path)
    except OSError as problem:
        return f"unreadable: {problem.strerror}"
