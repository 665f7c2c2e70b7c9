"""Parquet shards: where they come from, in which order, which validate, and how they are read."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nexttransformer.errors import DataError

BUNDLED_FOLDER = Path(__file__).parent.parent / "resources" / "corpus"
TEXT_COLUMN = "text"
CLIMBMIX_VALIDATION = (6541, 6542)


@dataclass(frozen=True)
class Source:
    """An ordered set of shards.

    Attributes:
        kind: bundled, climbmix or folder.
        training, validation: shard names in order; no name is in both.
        fetch: shard name -> local file, downloading it if need be.
        local_bytes: shard name -> size, for shards known to be on this machine.
        recorded_sha256: shard name -> SHA-256 it had when it was downloaded, if known.
    """

    kind: str
    training: tuple[str, ...]
    validation: tuple[str, ...]
    fetch: Callable[[str], Path]
    local_bytes: dict[str, int]
    recorded_sha256: Callable[[str], str | None] = lambda name: None


def shard_name(index: int) -> str:
    """Returns the file name of shard number `index`."""
    return f"shard_{index:05d}.parquet"


def folder_source(folder: Path, *, kind: str = "folder") -> Source:
    """Describes a local folder of parquet files.

    `shard_*.parquet` if there are any, else `*.parquet`, in order of number, then name, whatever the
    directory listing says. The last one validates; a copy of ClimbMix validates with its last two.

    Raises:
        DataError: if the folder is missing, holds fewer than two shards, or is a ClimbMix copy with gaps.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of parquet files.")
    paths = [path for path in folder.glob("shard_*.parquet") if path.is_file()]
    paths = paths or [path for path in folder.glob("*.parquet") if path.is_file()]
    names = sorted((path.name for path in paths), key=_order)
    validation = 1
    if names and names[-1] == shard_name(CLIMBMIX_VALIDATION[-1]):
        validation = len(CLIMBMIX_VALIDATION)
        _check_climbmix_copy(folder, names)
    if len(names) <= validation:
        raise DataError(
            f"{folder}: {len(names)} parquet shard(s): expected at least {validation + 1} "
            "(the last ones are the validation split, the others are training)."
        )
    sizes = {path.name: path.stat().st_size for path in paths}
    return Source(kind, tuple(names[:-validation]), tuple(names[-validation:]), lambda name: folder / name, sizes)


def bundled_source() -> Source:
    """Describes the public-domain corpus that ships with the package."""
    return folder_source(BUNDLED_FOLDER, kind="bundled")


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a shard; a missing file is a DataError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}.") from None
    return digest.hexdigest()


def row_group_documents(path: Path) -> list[int]:
    """Returns the number of documents of each row group of a shard.

    Raises:
        DataError: if the file is damaged, cut short, or has no string column `text`.
    """
    import pyarrow as pa

    file = _open(path)
    schema = file.schema_arrow
    if TEXT_COLUMN not in schema.names:
        raise DataError(f"{path}: no column '{TEXT_COLUMN}': it has {', '.join(schema.names) or 'none'}.")
    kind = schema.field(TEXT_COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column '{TEXT_COLUMN}' has type {kind}: expected string.")
    return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def read_row_group(path: Path, group: int) -> list[str]:
    """Returns the documents of one row group.

    Raises:
        DataError: if the file is damaged or a text is missing; names the file and row group.
    """
    import pyarrow as pa

    try:
        texts = _open(path).read_row_group(group, columns=[TEXT_COLUMN], use_threads=False)[TEXT_COLUMN].to_pylist()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as problem:
        raise _damaged(path, f"row group {group}: {problem}") from None
    missing = [row for row, text in enumerate(texts) if text is None]
    if missing:
        raise DataError(f"{path}: row group {group}, row {missing[0]}: '{TEXT_COLUMN}' is null: expected a string.")
    return texts


def _order(name: str) -> tuple[int, str]:
    match = re.fullmatch(r"shard_(\d+)\.parquet", name)
    return (int(match[1]) if match else -1, name)


def _check_climbmix_copy(folder: Path, names: list[str]) -> None:
    first, last = CLIMBMIX_VALIDATION
    expected = [shard_name(index) for index in (*range(len(names) - 2), first, last)]
    missing = [name for name in expected if name not in names]
    if missing:
        raise DataError(
            f"{folder}: this copy of ClimbMix lacks {missing[0]}: expected training shards from {shard_name(0)} "
            f"without gaps, then {shard_name(first)} and {shard_name(last)} (validation)."
        )


def _open(path: Path) -> Any:
    """Returns an open ParquetFile; the footer of the same file is not parsed for every row group."""
    try:
        status = path.stat()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}.") from None
    return _open_version(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _open_version(path: Path, num_bytes: int, modified: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as problem:
        raise _damaged(path, f"{num_bytes:,} bytes: {problem}") from None


def _damaged(path: Path, detail: str) -> DataError:
    text = " ".join(detail.split())[:200]
    return DataError(f"{path}: damaged or cut short ({text}). Fetch this shard again.")
