"""What a preparation is asked for, and whether the volume has room for it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nexttransformer.data.shards import Source
from nexttransformer.errors import DataError
from nexttransformer.protocol import Protocol

# About a third of the document tokens is dropped by packing; only used for estimates.
KEPT_FRACTION = 0.65
# Token ids of a parquet shard take about this many times its size.
_TOKENS_BYTES_PER_PARQUET_BYTE = 1.6


@dataclass(frozen=True)
class Request:
    """What to prepare.

    Attributes:
        protocol: sizes and rows.
        folder: the protocol's data folder.
        source: where shards come from.
        rows: training rows wanted; None: the protocol's.
        is_repeated: mark the manifest as repeated.
        tokenizer: an existing tokenizer file to use; None: train one.
        num_workers: processes.
        is_published_checked: compare with the published digests (not while publishing them).
    """

    protocol: Protocol
    folder: Path
    source: Source
    rows: int | None = None
    is_repeated: bool = False
    tokenizer: Path | None = None
    num_workers: int = 1
    is_published_checked: bool = True

    @property
    def num_rows(self) -> int:
        """Training rows wanted."""
        return self.protocol.num_rows if self.rows is None else self.rows

    @property
    def is_protocol_data(self) -> bool:
        """The request is for exactly the data whose digests are published."""
        return self.rows is None and not self.is_repeated and self.source.kind != "folder"


def check_space(request: Request) -> None:
    """Raises DataError if the volume has clearly too little room for token files and rows."""
    row_bytes = 2 * (request.protocol.context_tokens + 1) + 8
    needed = request.num_rows * row_bytes * (1 + 1 / KEPT_FRACTION)
    if request.source.local_bytes:
        needed = min(needed, 2 * _TOKENS_BYTES_PER_PARQUET_BYTE * sum(request.source.local_bytes.values()))
    free = shutil.disk_usage(request.folder).free
    if free < needed:
        raise DataError(
            f"{request.folder}: {free / 1e9:,.1f} GB free: about {needed / 1e9:,.1f} GB are needed for "
            f"{request.num_rows:,} rows. Free space, name another data_root, or ask for fewer --rows."
        )
