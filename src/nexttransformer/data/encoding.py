"""Shards -> tokens, in parallel, in order and resumable: the step before rows are planned."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from nexttransformer import jsonio
from nexttransformer.data import shards
from nexttransformer.data.manifest import Shard, SourcePart
from nexttransformer.data.reporting import Bar
from nexttransformer.data.token_files import (
    RECORD_SCHEMA,
    TOKEN_DTYPE,
    EncodedShard,
    TokenWriter,
    check_ids,
    load_kept,
)
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.data.workers import Workers
from nexttransformer.errors import DataError


@dataclass(frozen=True)
class _Task:
    shard: int
    path: Path
    group: int
    tokenizer: Path
    tokenizer_digest: str


@dataclass(frozen=True)
class _Batch:
    shard: int
    lengths: np.ndarray
    tokens: np.ndarray


class DocumentStream:
    """The documents of shards in order, as lengths for the planner and as token files for the writer.

    Attributes:
        encoded: one entry per shard read so far; complete once `lengths` has ended or was closed.
        listed: manifest entries of all shards looked at.
    """

    def __init__(self, *, source: shards.Source, folder: Path, tokenizer: Path, workers: Workers) -> None:
        """Prepares to encode; `folder` keeps token files, `tokenizer` is the tokenizer file."""
        self.source, self.folder, self.workers = source, folder, workers
        self.tokenizer_path = tokenizer
        self.tokenizer_digest = jsonio.file_digest(tokenizer)
        self.encoded: list[EncodedShard] = []
        self.listed: list[Shard] = []
        self._kept: dict[int, EncodedShard] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def lengths(
        self, names: tuple[str, ...], *, split: SourcePart, bar: Bar, total_tokens: float
    ) -> Generator[int, None, None]:
        """Yields the length of each document of the named shards; reads a little ahead of the consumer.

        Args:
            names: shard names in order.
            split: train or validation, for the manifest.
            bar: progress, in tokens.
            total_tokens: tokens that will be needed; fewer if the local shards end before.
        """
        local_bytes = sum(self.source.local_bytes.get(name, 0) for name in names)
        seen_bytes, writer = 0, None
        try:
            for batch in self.workers.map(_encode_row_group, self._tasks(names, split)):
                if writer is None or writer.shard != batch.shard:
                    if writer is not None:
                        self.encoded.append(writer.finish(self._record_base(writer.shard)))
                        seen_bytes += self.listed[writer.shard].bytes
                        writer = None
                    kept = self._kept.pop(batch.shard, None)
                    if kept is not None:
                        self.encoded.append(kept)
                        seen_bytes += self.listed[batch.shard].bytes
                        bar.advance(
                            float(kept.lengths.sum()), total=_expected(bar, total_tokens, seen_bytes, local_bytes)
                        )
                        yield from kept.lengths.tolist()
                        continue
                    writer = TokenWriter(batch.shard, self.folder, self.listed[batch.shard].name)
                writer.write(batch.lengths, batch.tokens)
                bar.advance(len(batch.tokens), total=_expected(bar, total_tokens, seen_bytes, local_bytes))
                yield from batch.lengths.tolist()
            if writer is not None:
                self.encoded.append(writer.finish(self._record_base(writer.shard)))
                writer = None
        finally:
            if writer is not None:
                self.encoded.append(writer.stop())

    def _tasks(self, names: tuple[str, ...], split: SourcePart) -> Iterator[_Task]:
        """Yields one task per row group; a shard whose tokens were kept yields one empty task."""
        for name in names:
            path = self.source.fetch(name)
            groups = shards.row_group_documents(path)
            sha256 = shards.file_sha256(path)
            if self.source.recorded_sha256(name) not in (None, sha256):
                raise DataError(f"{path}: changed since it was downloaded. Remove it and repeat the command.")
            num_bytes = path.stat().st_size
            self.listed.append(Shard(name=name, split=split, bytes=num_bytes, sha256=sha256, documents=sum(groups)))
            index = len(self.listed) - 1
            kept = load_kept(self.folder, self._record_base(index))
            if kept is not None:
                self._kept[index] = kept
            for group in range(len(groups)) if kept is None else (-1,):
                yield _Task(index, path, group, self.tokenizer_path, self.tokenizer_digest)

    def _record_base(self, shard: int) -> dict[str, str | int]:
        entry = self.listed[shard]
        return {
            "schema": RECORD_SCHEMA,
            "shard": entry.name,
            "shard_sha256": entry.sha256,
            "tokenizer_digest": self.tokenizer_digest,
            "documents": entry.documents,
        }


def _expected(bar: Bar, total_tokens: float, seen_bytes: int, local_bytes: int) -> float:
    """Returns the tokens this step will probably read: what is needed, or all there is if that is less."""
    if not (seen_bytes and local_bytes):
        return total_tokens
    return min(total_tokens, max(bar.completed * local_bytes / seen_bytes, bar.completed))


@lru_cache(maxsize=1)
def _tokenizer(path: Path, digest: str) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    if tokenizer.digest != digest:
        raise DataError(f"{path}: changed while it was in use.")
    return tokenizer


def _encode_row_group(task: _Task) -> _Batch:
    """Encodes one row group in a worker."""
    if task.group < 0:
        return _Batch(task.shard, np.zeros(0, np.int32), np.zeros(0, TOKEN_DTYPE))
    tokenizer = _tokenizer(task.tokenizer, task.tokenizer_digest)
    ids: list[int] = []
    lengths: list[int] = []
    for row, text in enumerate(shards.read_row_group(task.path, task.group)):
        start = len(ids)
        ids.append(tokenizer.bos_id)
        try:
            ids.extend(tokenizer.encode(text))
        except DataError as problem:
            raise DataError(f"{task.path}: row group {task.group}, row {row}: {problem}") from None
        lengths.append(len(ids) - start)
    tokens = np.array(ids, dtype=np.int64)
    check_ids(tokens, tokenizer.vocab_size, where=f"{task.path}: row group {task.group}")
    return _Batch(task.shard, np.array(lengths, dtype=np.int32), tokens.astype(TOKEN_DTYPE))
