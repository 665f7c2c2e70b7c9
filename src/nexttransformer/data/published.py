"""Published digests of a protocol's data: written by the maintainer, compared by everybody."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nexttransformer import jsonio
from nexttransformer.data import order
from nexttransformer.data.manifest import DATA_ORDER_FILE_NAME, Manifest
from nexttransformer.errors import DataError
from nexttransformer.protocol import PUBLISHED_FOLDER, Protocol

PUBLISHED_FILE_NAME = "published.json"
PUBLISHED_SCHEMA = "nexttransformer.published/1"
DATA_ORDER_SCHEMA = "nexttransformer.data_order/1"


def data_order(hashes: np.ndarray, protocol: Protocol, *, is_repeated: bool) -> dict[str, Any]:
    """Returns the content of `data_order.json`: the chain at the preset updates the rows reach.

    Args:
        hashes: uint64 [R], row hashes of the training split.
        protocol: batch, length and preset updates.
        is_repeated: rows wrap around, so the chain reaches the last update.
    """
    batch = protocol.global_batch_rows
    reached = protocol.num_updates if is_repeated else min(protocol.num_updates, len(hashes) // batch)

    def sums() -> Iterator[int]:
        for update in range(reached):
            rows = np.arange(update * batch, (update + 1) * batch, dtype=np.int64)
            yield order.sum_hashes(hashes[rows % len(hashes)])

    chain = [[update, order.to_hex(value)] for update, value in order.chain_values(sums(), at=protocol.bpb_updates())]
    return {
        "schema": DATA_ORDER_SCHEMA,
        "protocol": protocol.id,
        "global_batch_rows": batch,
        "chain": chain,
    }


def load_data_order(path: Path) -> dict[int, int]:
    """Returns {completed updates: chain value} of a `data_order.json`.

    Raises:
        DataError: if it is missing or malformed.
    """
    value = jsonio.read_json(path, DataError)
    try:
        if value["schema"] != DATA_ORDER_SCHEMA:
            raise ValueError(f"schema is {value['schema']!r}: expected {DATA_ORDER_SCHEMA!r}")
        return {int(update): order.from_hex(text) for update, text in value["chain"]}
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"{path}: not a data order file: {problem}.") from None


def published_values(manifest: Manifest, protocol: Protocol) -> dict[str, Any]:
    """Returns the content of `published.json` for prepared data."""
    return {
        "schema": PUBLISHED_SCHEMA,
        "protocol": protocol.id,
        "manifest": manifest.digest,
        "tokenizer": manifest.tokenizer_digest,
        "byte_table": manifest.byte_table_digest,
        "data_order": manifest.data_order_digest,
        "val_curve": manifest.splits["val_curve"].summary(),
        "val_final": manifest.splits["val_final"].summary(),
    }


def differences(manifest: Manifest, protocol: Protocol) -> list[str]:
    """Returns one line per published value that prepared data does not have; empty if none is published."""
    published = protocol.published()
    if not published:
        return []
    found = published_values(manifest, protocol)
    return [
        f"{key} differs from the published one of {protocol.id}: got {found[key]}, expected {published.get(key)}."
        for key in found
        if found[key] != published.get(key)
    ]


def publish(manifest: Manifest, protocol: Protocol, *, folder: Path) -> Path:
    """Writes `published.json` and `data_order.json` of a protocol into the package.

    Raises:
        DataError: if the data is not the protocol's whole data.
    """
    problems = [
        *(["its rows repeat (--repeat)."] if manifest.is_repeated else []),
        *(["its source is a folder given with --source."] if manifest.source == "folder" else []),
        *(
            f"{name} has {manifest.splits[name].rows:,} rows: expected {rows:,}."
            for name, rows in wanted_rows(protocol).items()
            if manifest.splits[name].rows != rows
        ),
    ]
    if problems:
        raise DataError("\n".join(f"{folder}: cannot be published: {problem}" for problem in problems))
    target = PUBLISHED_FOLDER / protocol.id
    target.mkdir(parents=True, exist_ok=True)
    jsonio.write_bytes_atomic(target / DATA_ORDER_FILE_NAME, (folder / DATA_ORDER_FILE_NAME).read_bytes())
    jsonio.write_json_atomic(target / PUBLISHED_FILE_NAME, published_values(manifest, protocol))
    return target


def wanted_rows(protocol: Protocol) -> dict[str, int]:
    """Returns the rows of each split that a whole run of a protocol needs."""
    return {"train": protocol.num_rows, "val_curve": protocol.val_curve_rows, "val_final": protocol.val_final_rows}
