"""Planned rows -> row files: uint16 rows and their 64-bit hashes, written in parallel, atomically."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from nexttransformer import jsonio
from nexttransformer.data import order
from nexttransformer.data.manifest import ROWS_PER_FILE, RowFile, split_digest
from nexttransformer.data.packing import RowPlan
from nexttransformer.data.reporting import Bar
from nexttransformer.data.token_files import TOKEN_DTYPE, EncodedShard, check_ids, locate
from nexttransformer.data.workers import Workers

HASH_DTYPE = "<u8"


@dataclass(frozen=True)
class WrittenSplit:
    """What was written for one split; `hashes` is uint64 [rows]."""

    files: tuple[RowFile, ...]
    digest: str
    rows: int
    tokens_counted: int
    bytes: int
    hashes: np.ndarray


@dataclass(frozen=True)
class _Task:
    folder: Path
    index: int
    num_rows: int
    row_tokens: int
    token_files: tuple[Path, ...]
    piece_shards: np.ndarray
    piece_offsets: np.ndarray
    piece_tokens: np.ndarray
    byte_lengths: np.ndarray


@dataclass(frozen=True)
class _Written:
    file: RowFile
    tokens_counted: int
    bytes: int
    hashes: np.ndarray


def write_split(
    plan: RowPlan,
    encoded: list[EncodedShard],
    *,
    folder: Path,
    row_tokens: int,
    byte_lengths: np.ndarray,
    workers: Workers,
    bar: Bar,
) -> WrittenSplit:
    """Writes the rows of a plan in files of `ROWS_PER_FILE` rows.

    Args:
        plan: pieces whose document indices count over all documents of `encoded`.
        encoded: the shards the documents are in.
        folder: the split's folder.
        row_tokens: T + 1.
        byte_lengths: int32 [V].
        workers: who writes.
        bar: progress, in rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shard_of_piece, offset_of_piece = locate(encoded, plan.documents)

    def tasks() -> Iterator[_Task]:
        for index, first in enumerate(range(0, plan.num_rows, ROWS_PER_FILE)):
            num_rows = min(ROWS_PER_FILE, plan.num_rows - first)
            pieces = slice(plan.row_starts[first], plan.row_starts[first + num_rows])
            used, local = np.unique(shard_of_piece[pieces], return_inverse=True)
            yield _Task(
                folder,
                index,
                num_rows,
                row_tokens,
                tuple(encoded[shard].path for shard in used),
                local.astype(np.int32),
                offset_of_piece[pieces],
                plan.tokens[pieces],
                byte_lengths,
            )

    written: list[_Written] = []
    for part in workers.map(_write_file, tasks()):
        written.append(part)
        bar.advance(part.file.rows)
    files = tuple(part.file for part in written)
    _remove_others(folder, files)
    return WrittenSplit(
        files=files,
        digest=split_digest(files, row_tokens=row_tokens, rows_per_file=ROWS_PER_FILE),
        rows=plan.num_rows,
        tokens_counted=sum(part.tokens_counted for part in written),
        bytes=sum(part.bytes for part in written),
        hashes=np.concatenate([*(part.hashes for part in written), np.zeros(0, np.uint64)]),
    )


def _remove_others(folder: Path, files: tuple[RowFile, ...]) -> None:
    """Removes row files of an earlier, larger preparation."""
    listed = {name for file in files for name in (file.name, file.hashes_name)}
    for path in folder.glob("rows_*"):
        if path.name not in listed:
            path.unlink()


@lru_cache(maxsize=64)
def _token_file(path: Path, num_bytes: int, modified: int) -> np.ndarray:
    return np.memmap(path, dtype=TOKEN_DTYPE, mode="r")


def _open_tokens(path: Path) -> np.ndarray:
    # Keyed by size and time: a path may be written again by a later attempt of a long-lived worker.
    status = path.stat()
    return _token_file(path, status.st_size, status.st_mtime_ns)


def _write_file(task: _Task) -> _Written:
    """Assembles and writes one row file in a worker."""
    flat = np.empty(task.num_rows * task.row_tokens, dtype=TOKEN_DTYPE)
    sources = [_open_tokens(path) for path in task.token_files]
    position = 0
    pieces = zip(task.piece_shards.tolist(), task.piece_offsets.tolist(), task.piece_tokens.tolist(), strict=True)
    for shard, offset, taken in pieces:
        flat[position : position + taken] = sources[shard][offset : offset + taken]
        position += taken
    assert position == len(flat), (position, len(flat))
    rows = flat.reshape(task.num_rows, task.row_tokens)
    name, hashes_name = f"rows_{task.index:05d}.u16", f"rows_{task.index:05d}.hashes"
    check_ids(rows, len(task.byte_lengths), where=str(task.folder / name))
    hashes = order.row_hashes(rows)
    content, hashes_content = rows.tobytes(), hashes.astype(HASH_DTYPE).tobytes()
    jsonio.write_bytes_atomic(task.folder / name, content)
    jsonio.write_bytes_atomic(task.folder / hashes_name, hashes_content)
    target_bytes = task.byte_lengths[rows[:, 1:]]
    file = RowFile(
        name=name,
        rows=task.num_rows,
        sha256=hashlib.sha256(content).hexdigest(),
        hashes_name=hashes_name,
        hashes_sha256=hashlib.sha256(hashes_content).hexdigest(),
    )
    return _Written(file, int((target_bytes > 0).sum()), int(target_bytes.sum(dtype=np.int64)), hashes)
