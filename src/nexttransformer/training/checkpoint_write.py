"""The steps of a save: prepare the folder, write tensors, write the small files, rename, write the marker."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nexttransformer import jsonio
from nexttransformer.errors import NextTransformerError
from nexttransformer.training import checkpoint_files as files
from nexttransformer.training.checkpoint_schema import (
    CompleteMarker,
    FileEntry,
    ProtocolFile,
    ProtocolReference,
    StateEntry,
    TrainerState,
)
from nexttransformer.training.retention import check_save_space
from nexttransformer.training.safetensors_file import WrittenFile, write_safetensors
from nexttransformer.training.save_errors import SaveFailed, SaveRefused
from nexttransformer.training.weights_digest import DTYPE_NAMES

# How long a node may take to see a folder that rank 0 made (attribute caches of shared file systems).
FOLDER_SEEN_SECONDS = 60.0

Hook = Callable[[str], None]


def check_lock_is_ours(check_lock: Callable[[], None]) -> None:
    """Turns a lost lock into SaveRefused."""
    try:
        check_lock()
    except NextTransformerError as error:
        raise SaveRefused(str(error), "lock_lost") from None


def prepare_folder(final: Path, partial: Path, *, run_id: str, num_bytes: int) -> None:
    """Frees the checkpoint's name, checks the space and makes the `.partial` folder (rank 0).

    A folder of that name without a marker is removed if it is this run's; a damaged or foreign one is
    put aside; a complete one is an error.

    Raises:
        SaveFailed: reasons `exists`, `space`, `write`.
    """
    try:
        if final.exists():
            _free_name(final, run_id)
        shortage = check_save_space(final.parent, num_bytes)
        if shortage:
            raise SaveFailed(f"{final} was not saved: {shortage} Older checkpoints are untouched.", "space")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        jsonio.fsync_folder(final.parent)
    except OSError as problem:
        raise write_failure(problem, final, partial.name) from None


def _free_name(final: Path, run_id: str) -> None:
    try:
        files.read_marker(final)
    except files.UnusableCheckpoint:
        if files.is_own(final, run_id) and not (final / files.MARKER_FILE).exists():
            files.remove_checkpoint(final)
        else:
            files.put_aside(final)
        return
    raise SaveFailed(f"{final} exists and is complete; a complete checkpoint is never overwritten.", "exists")


def wait_for_folder(folder: Path, *, rank: int, host: str) -> None:
    """Returns once this rank sees the folder; SaveFailed `folder_not_seen` after a minute."""
    limit = time.monotonic() + FOLDER_SEEN_SECONDS
    while not folder.is_dir():
        if time.monotonic() > limit:
            raise SaveFailed(
                f"{folder}: rank {rank} on {host} does not see the folder that rank 0 made. Every node needs the "
                "same output folder. Older checkpoints are untouched.",
                "folder_not_seen",
            )
        time.sleep(0.05)


def write_tensor_file(
    partial: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, rank: int, host: str
) -> WrittenFile:
    """Writes one file of tensors durably.

    Raises:
        SaveFailed: reason `write`, naming file, rank, host and free space.
    """
    try:
        return write_safetensors(partial / name, tensors, metadata)
    except OSError as problem:
        raise write_failure(problem, partial.with_suffix(""), name, f"rank {rank} on {host}") from None


def describe_states(name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, StateEntry]]:
    """Returns key -> (file, entry) of the optimizer states in a file."""
    return {
        key: (name, StateEntry(dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape)))
        for key, tensor in tensors.items()
    }


def finish_folder(
    final: Path,
    partial: Path,
    *,
    state: TrainerState,
    protocol: ProtocolFile,
    entries: list[FileEntry],
    weights_digest: str,
    contents: Mapping[str, Any],
    check_lock: Callable[[], None],
    hook: Hook,
) -> CompleteMarker:
    """Writes the small files, makes all durable, renames the folder and writes the marker (rank 0).

    Raises:
        SaveFailed: reason `write`; neither folder is left.
        SaveRefused: the lock was lost meanwhile; what was written stays without a marker.
    """
    try:
        entries = list(entries)
        for name, value in contents.items():
            content = (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
            jsonio.write_bytes_atomic(partial / name, content)
            entries.append(FileEntry(path=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
            hook(f"file:{name}")
        jsonio.fsync_folder(partial)
        hook("folder_durable")
        check_lock_is_ours(check_lock)
        os.rename(partial, final)
        jsonio.fsync_folder(final.parent)
        hook("folder_renamed")
        marker = CompleteMarker(
            run_id=state.run_id,
            mode=state.mode,
            method=state.method,
            protocol=ProtocolReference(id=protocol.id, digest=protocol.digest),
            update=state.update,
            tokens_seen=state.tokens_seen,
            data_chain=state.data_chain,
            weights_digest=weights_digest,
            files=sorted(entries, key=lambda entry: entry.path),
        )
        jsonio.write_bytes_atomic(final / files.MARKER_FILE, jsonio.canonical_bytes(marker.to_json()))
        hook("marker_written")
        return marker
    except OSError as problem:
        failure = write_failure(problem, final, files.MARKER_FILE if final.exists() else partial.name)
        discard(partial)
        if final.exists():
            files.remove_checkpoint(final)
        raise failure from None


def discard(partial: Path) -> None:
    """Removes what a failed save wrote."""
    shutil.rmtree(partial, ignore_errors=True)


def write_failure(problem: OSError, final: Path, name: str, who: str = "rank 0") -> SaveFailed:
    """Returns the error for a file that could not be written, with what is free on the volume."""
    free = shutil.disk_usage(final.parent).free
    return SaveFailed(
        f"{final} was not saved: {name} could not be written by {who}: {problem.strerror}, with {free:,} bytes free. "
        "Older checkpoints are untouched. Free some space, or raise the quota or file-size limit.",
        "write",
        name,
    )
