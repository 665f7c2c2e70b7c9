"""Preparing a data folder: find it complete, or build it, and write the manifest last."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nexttransformer import jsonio
from nexttransformer.data import published, verify
from nexttransformer.data.build import WORK_FOLDER, Build
from nexttransformer.data.loader import RowReader
from nexttransformer.data.manifest import (
    DATA_ORDER_FILE_NAME,
    FILE_NAME,
    Manifest,
    check_protocol,
    load_manifest,
    seal,
)
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.request import Request
from nexttransformer.data.shards import Source
from nexttransformer.data.workers import Workers
from nexttransformer.errors import DataError, join_problems

__all__ = ["Request", "figures", "prepare"]


def prepare(request: Request, reporter: Reporter) -> Manifest:
    """Prepares data, or finds it prepared; repeating it is safe at any time.

    Raises:
        DataError: for missing, damaged or too little text, other data in the folder, or digests that
            differ from the published ones.
    """
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot be made: {error.strerror}. Correct 'data_root' in the site file."
        raise DataError(f"{str(request.folder)[:200]}: {reason}") from None
    with _lock(request.folder, reporter):
        manifest = _find(request, reporter)
        if manifest is not None:
            state = "complete, nothing to do; sizes and digests checked"
        else:
            with Workers(request.num_workers) as workers:
                content, hashes = Build(request, reporter, workers).run()
            manifest = _finish(request, content, hashes, reporter)
            shutil.rmtree(request.folder / WORK_FOLDER)
            state = "prepared"
    reporter.say(f"{request.folder}: {state}. {figures(manifest, request)}")
    return manifest


def figures(manifest: Manifest, request: Request) -> str:
    """Returns one line with what a folder holds and how far it reaches."""
    protocol = request.protocol
    train = manifest.splits["train"]
    updates = train.rows // protocol.global_batch_rows
    text = f"{train.rows:,} training rows of {manifest.row_tokens:,} tokens make {updates:,} updates"
    if manifest.is_repeated:
        epochs = protocol.num_rows / train.rows
        text += f", repeated {epochs:,.2f} times for {protocol.num_updates:,} (never formal)"
    elif updates < protocol.num_updates:
        text += f" of {protocol.num_updates:,}"
    for name, wanted in published.wanted_rows(protocol).items():
        rows = manifest.splits[name].rows
        if name != "train":
            text += f"; {name} {rows:,} rows" + (f" of {wanted:,}" if rows != wanted else "")
    if not manifest.is_repeated and train.is_exhausted and train.rows < request.num_rows:
        text += f". The source ends before {request.num_rows:,} rows: give more text, or allow --repeat"
    return text + "."


@contextmanager
def _lock(folder: Path, reporter: Reporter) -> Iterator[None]:
    with (folder / "prepare.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another prepare_data is at work here. Wait until it has ended.") from None
        except OSError as problem:
            reporter.say(f"{folder}: this file system has no locks ({problem.strerror}): start only one prepare_data.")
        yield


def _find(request: Request, reporter: Reporter) -> Manifest | None:
    """Returns the manifest if the folder already serves the request; else clears the way to build."""
    folder = request.folder
    if not (folder / FILE_NAME).exists():
        return None
    try:
        manifest = load_manifest(folder)
        check_protocol(manifest, request.protocol, folder=folder)
    except DataError as problem:
        reporter.say(f"{problem}\nPreparing again.")
        (folder / FILE_NAME).unlink()
        return None
    _refuse_other_data(request, manifest)
    train = manifest.splits["train"]
    problems = verify.quick_problems(folder, manifest)
    if problems:
        reporter.say(join_problems(problems) + "\nPreparing again.")
    elif train.rows < request.num_rows and not train.is_exhausted:
        reporter.say(f"{folder}: {train.rows:,} rows are stored, {request.num_rows:,} are wanted: preparing again.")
    elif train.rows > request.num_rows and request.is_protocol_data:
        reporter.say(f"{folder}: {train.rows:,} rows are stored, exactly {request.num_rows:,} are wanted: again.")
    elif manifest.is_repeated != request.is_repeated:
        hashes = RowReader(folder, "train", manifest=manifest).hashes(np.arange(train.rows))
        (folder / FILE_NAME).unlink()
        return _finish(request, {**manifest.to_dict(), "is_repeated": request.is_repeated}, hashes, reporter)
    else:
        _compare(request, manifest, reporter)
        return manifest
    (folder / FILE_NAME).unlink()
    return None


def _refuse_other_data(request: Request, manifest: Manifest) -> None:
    """Raises DataError if a folder holds data of another source or tokenizer: nobody loses it by accident."""
    source = request.source
    other = None
    if manifest.source != source.kind or _has_other_shards(manifest, source):
        other = f"another source ({manifest.source}: {manifest.shards[0].name} ... {manifest.shards[-1].name})"
    elif request.tokenizer is not None and jsonio.file_digest(request.tokenizer) != manifest.tokenizer_digest:
        other = f"another tokenizer than {request.tokenizer}"
    if other:
        raise DataError(
            f"{request.folder}: holds data of {other}. Remove that folder, or name another data_root in the site file."
        )


def _has_other_shards(manifest: Manifest, source: Source) -> bool:
    training = [shard.name for shard in manifest.shards if shard.split == "train"]
    validation = [shard.name for shard in manifest.shards if shard.split == "validation"]
    return (
        training != list(source.training[: len(training)])
        or validation != list(source.validation)
        or any(source.local_bytes.get(shard.name, shard.bytes) != shard.bytes for shard in manifest.shards)
    )


def _finish(request: Request, content: dict[str, Any], hashes: np.ndarray, reporter: Reporter) -> Manifest:
    """Derives the data order, compares with what is published, and writes the manifest last."""
    order = published.data_order(hashes, request.protocol, is_repeated=request.is_repeated)
    manifest = seal({**content, "data_order_digest": jsonio.digest(order)})
    _compare(request, manifest, reporter)
    jsonio.write_json_atomic(request.folder / DATA_ORDER_FILE_NAME, order)
    jsonio.write_json_atomic(request.folder / FILE_NAME, manifest.to_dict())
    return manifest


def _compare(request: Request, manifest: Manifest, reporter: Reporter) -> None:
    """Compares with the published digests; only other data than the protocol's own may differ."""
    if not request.is_published_checked:
        return
    protocol = request.protocol
    if not protocol.published():
        reporter.say(f"No data digests are published for {protocol.id} yet: its results cannot be judged.")
        return
    problems = published.differences(manifest, protocol)
    if problems and request.is_protocol_data:
        raise DataError(join_problems([f"{request.folder}: {problem}" for problem in problems]))
    if problems:
        reporter.say(f"This is not the published data of {protocol.id}: results made with it are open, never ranked.")
