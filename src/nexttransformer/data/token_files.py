"""Token files: the documents of one shard as ids, an intermediate form that interrupted work keeps.

A token file holds each document as BOS + tokens, one after another, as little-endian uint16. It gets
its final name, and a record of its digests, only when the whole shard is done; a later attempt verifies
and keeps such files. They are removed once the rows are written.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nexttransformer import jsonio
from nexttransformer.errors import DataError

TOKEN_DTYPE = "<u2"
RECORD_SCHEMA = "nexttransformer.encoded_shard/1"


@dataclass(frozen=True)
class EncodedShard:
    """Tokens of a shard's documents, or of its first ones if the stream ended inside it.

    Attributes:
        path: token file, uint16, documents one after another.
        lengths: int32 [documents], tokens of each document, BOS included.
    """

    path: Path
    lengths: np.ndarray


class TokenWriter:
    """Appends batches of one shard to a temporary file, hashing on the way."""

    def __init__(self, shard: int, folder: Path, name: str) -> None:
        self.shard = shard
        self._path = folder / f"{name}.tokens"
        self._temporary = folder / f".{name}.tokens.tmp"
        self._file = self._temporary.open("wb")
        self._digest = hashlib.sha256()
        self._lengths: list[np.ndarray] = []

    def write(self, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Appends documents: lengths int32 [documents], tokens uint16, one document after another."""
        self._file.write(tokens.data)
        self._digest.update(tokens.data)
        self._lengths.append(lengths)

    def finish(self, record: dict[str, str | int]) -> EncodedShard:
        """Gives the files their final names; the record, written last, makes them count."""
        lengths = self.stop().lengths
        _record_path(self._path).unlink(missing_ok=True)
        content = lengths.astype("<i4").tobytes()
        jsonio.write_bytes_atomic(_lengths_path(self._path), content)
        self._temporary.replace(self._path)
        digests = {"tokens_sha256": self._digest.hexdigest(), "lengths_sha256": hashlib.sha256(content).hexdigest()}
        jsonio.write_json_atomic(_record_path(self._path), {**record, **digests})
        return EncodedShard(self._path, lengths)

    def stop(self) -> EncodedShard:
        """Ends inside the shard: the temporary file serves this attempt only."""
        self._file.close()
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        return EncodedShard(self._temporary, lengths)


def _record_path(tokens: Path) -> Path:
    return tokens.with_suffix(".json")


def _lengths_path(tokens: Path) -> Path:
    return tokens.with_suffix(".lengths")


def load_kept(folder: Path, record: dict[str, str | int]) -> EncodedShard | None:
    """Returns the finished tokens of a shard from an earlier attempt, verified, or None."""
    path = folder / f"{record['shard']}.tokens"
    if not _record_path(path).is_file():
        return None
    try:
        found = jsonio.read_json(_record_path(path), DataError)
        digests = {"tokens_sha256": jsonio.file_digest(path), "lengths_sha256": jsonio.file_digest(_lengths_path(path))}
    except (DataError, OSError):
        return None
    if found != {**record, **digests}:
        return None
    return EncodedShard(path, np.fromfile(_lengths_path(path), dtype="<i4").astype(np.int32))


def check_ids(ids: np.ndarray, vocab_size: int, *, where: str) -> None:
    """Raises DataError if an id is not below the vocabulary size; ids are never wrapped."""
    if ids.size and int(ids.max()) >= vocab_size:
        raise DataError(f"{where}: token id {int(ids.max())}: expected below {vocab_size}.")


def locate(encoded: Iterable[EncodedShard], documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents start.

    Args:
        encoded: the shards of a stream, in order.
        documents: int64 [P], indices over all documents of the stream.

    Returns:
        Index of the shard (int32 [P]) and offset of BOS in its token file (int64 [P], in tokens).
    """
    lengths = [shard.lengths for shard in encoded]
    first_document = np.concatenate([[0], np.cumsum([len(part) for part in lengths])]).astype(np.int64)
    offsets = [np.cumsum(part, dtype=np.int64) - part for part in lengths]
    starts = np.concatenate([*offsets, np.zeros(0, np.int64)]).astype(np.int64)
    shard = (np.searchsorted(first_document, documents, side="right") - 1).astype(np.int32)
    return shard, starts[documents]
