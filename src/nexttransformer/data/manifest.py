"""The data manifest: what was prepared from what, with every size and digest; written last.

A folder without a valid `manifest.json` holds no prepared data. The manifest is deterministic: no
times, no paths, the same bytes for the same text and protocol on any machine and worker count.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexttransformer import jsonio
from nexttransformer.errors import DataError, join_problems
from nexttransformer.protocol import Protocol

FILE_NAME = "manifest.json"
DATA_ORDER_FILE_NAME = "data_order.json"
SCHEMA = "nexttransformer.data_manifest/1"
SPLITS = ("train", "val_curve", "val_final")
ROWS_PER_FILE = 16_384
_DATA_CONSTANTS = (
    "context_tokens",
    "vocab_size",
    "global_batch_rows",
    "num_updates",
    "tokenizer_training_characters",
    "tokenizer_document_characters",
    "packing_buffer_documents",
    "val_curve_rows",
    "val_final_rows",
    "bpb_every_updates",
    "byte_table_version",
)
SourcePart = Literal["train", "validation"]
Digest = Field(pattern="^[0-9a-f]{64}$")
Count = Field(ge=0)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shard(_Strict):
    """One parquet file that was read."""

    name: str
    split: SourcePart
    bytes: int = Count
    sha256: str = Digest
    documents: int = Count


class RowFile(_Strict):
    """One file of packed rows (uint16, [rows, T + 1]) and the file of its 64-bit row hashes."""

    name: str
    rows: int = Count
    sha256: str = Digest
    hashes_name: str
    hashes_sha256: str = Digest


class DocumentRange(_Strict):
    """Documents start, start + step, ... below stop of shard number `shard`."""

    shard: int = Count
    start: int = Count
    stop: int = Count
    step: int = Field(ge=1)


class Split(_Strict):
    """One list of packed rows.

    `tokens_counted` and `bytes` are over targets with a byte length above 0. `documents` are those read
    for the split. `is_exhausted` says that the source ended before the wanted rows were full.
    """

    rows: int = Count
    tokens_counted: int = Count
    bytes: int = Count
    digest: str = Digest
    is_exhausted: bool
    files: tuple[RowFile, ...]
    documents: tuple[DocumentRange, ...]

    def summary(self) -> dict[str, Any]:
        """The four values that identify a split in published digests and evaluations."""
        return {name: getattr(self, name) for name in ("digest", "rows", "tokens_counted", "bytes")}


class Manifest(_Strict):
    """The content of `manifest.json`; `digest` is taken over all other keys."""

    schema_: Literal["nexttransformer.data_manifest/1"] = Field(alias="schema")
    digest: str = Digest
    protocol: str
    constants: dict[str, int | str]
    source: Literal["bundled", "climbmix", "folder"]
    is_repeated: bool
    tokenizer_digest: str = Digest
    byte_table_digest: str = Digest
    data_order_digest: str = Digest
    rows_per_file: int = Field(ge=1)
    shards: tuple[Shard, ...]
    splits: dict[str, Split]

    @property
    def row_tokens(self) -> int:
        """Tokens of a stored row: context + 1."""
        return int(self.constants["context_tokens"]) + 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON value of the file."""
        return self.model_dump(by_alias=True, mode="json")


def data_constants(protocol: Protocol) -> dict[str, int | str]:
    """Returns the protocol's constants that prepared data depends on."""
    return {name: getattr(protocol, name) for name in _DATA_CONSTANTS}


def split_digest(files: list[RowFile] | tuple[RowFile, ...], *, row_tokens: int, rows_per_file: int) -> str:
    """Returns the digest of a split: over the SHA-256 of its row files, in order."""
    return jsonio.digest(
        {
            "row_tokens": row_tokens,
            "rows_per_file": rows_per_file,
            "rows": sum(file.rows for file in files),
            "files": [file.sha256 for file in files],
        }
    )


def seal(content: dict[str, Any]) -> Manifest:
    """Builds a manifest from all its keys but `schema` and `digest`."""
    value = {**content, "schema": SCHEMA}
    value.pop("digest", None)
    return Manifest.model_validate_json(jsonio.canonical_bytes({**value, "digest": jsonio.digest(value)}))


def load_manifest(folder: Path) -> Manifest:
    """Reads `manifest.json` of a prepared folder and checks its own digests.

    Raises:
        DataError: if it is missing, malformed, edited or inconsistent; all problems are named.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{folder}: no prepared data ({FILE_NAME} is missing). Run 'python -m nexttransformer.prepare_data'."
        )
    value = jsonio.read_json(path, DataError)
    try:
        manifest = Manifest.model_validate_json(jsonio.canonical_bytes(value))
    except ValidationError as error:
        problems = [
            f"{path}: {'.'.join(map(str, item['loc'])) or 'whole file'}: {item['msg']}." for item in error.errors()
        ]
        raise DataError(join_problems(problems)) from None
    problems = _inconsistencies(manifest, value)
    if problems:
        raise DataError(join_problems([f"{path}: {problem} Run 'prepare_data' again." for problem in problems]))
    return manifest


def check_protocol(manifest: Manifest, protocol: Protocol, *, folder: Path) -> None:
    """Raises DataError if data was prepared for other constants than the protocol's; names each one."""
    if manifest.protocol != protocol.id:
        raise DataError(f"{folder}: data was prepared for {manifest.protocol}: expected {protocol.id}.")
    expected = data_constants(protocol)
    problems = [
        f"{folder}: {name} is {manifest.constants.get(name)}: expected {value}. Run 'prepare_data' again."
        for name, value in expected.items()
        if manifest.constants.get(name) != value
    ]
    if problems:
        raise DataError(join_problems(problems))


def _inconsistencies(manifest: Manifest, value: dict[str, Any]) -> list[str]:
    """Returns what contradicts itself inside a manifest."""
    found = []
    if jsonio.digest({key: item for key, item in value.items() if key != "digest"}) != manifest.digest:
        found.append("its digest does not match its content (edited or damaged).")
    if set(manifest.splits) != set(SPLITS):
        found.append(f"splits are {sorted(manifest.splits)}: expected {sorted(SPLITS)}.")
    for name, split in manifest.splits.items():
        if sum(file.rows for file in split.files) != split.rows:
            found.append(f"splits.{name}.rows is {split.rows}: expected the sum of its files.")
        if split.digest != split_digest(
            split.files, row_tokens=manifest.row_tokens, rows_per_file=manifest.rows_per_file
        ):
            found.append(f"splits.{name}.digest does not match its files.")
        if any(part.shard >= len(manifest.shards) for part in split.documents):
            found.append(f"splits.{name}.documents names a shard that is not listed.")
    return found
