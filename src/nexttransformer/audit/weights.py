"""K1: the final checkpoint, every byte of it. K2 to K4 are checked by the export and the pull request."""

import hashlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from nexttransformer.audit import reader
from nexttransformer.audit.cell import guarded
from nexttransformer.audit.check import Finding, check, differs, error
from nexttransformer.audit.checkpoint_view import CheckpointView
from nexttransformer.audit.event_schema import CheckpointSaved
from nexttransformer.audit.run_view import RunView
from nexttransformer.training.checkpoint_files import JSON_FILES, MARKER_FILE, MODEL_FILE
from nexttransformer.training.checkpoint_schema import CompleteMarker
from nexttransformer.training.events import EventKey
from nexttransformer.training.weights_digest import combine_tensor_hashes

HASH_THREADS = 4


@check("K1")
def check_checkpoint(view: RunView) -> Iterator[Finding]:
    """Marker, files and weights of the final checkpoint."""
    checkpoint = view.newest
    if MARKER_FILE not in checkpoint.found_files:
        yield error("The final checkpoint has no marker: it is not complete.", checkpoint.marker.where)
        return
    marker = checkpoint.marker.get()
    yield from guarded(
        {
            "files": lambda: _files(view, checkpoint, marker),
            "identity": lambda: _identity(view, checkpoint, marker),
            "optimizer": lambda: _optimizer(view, checkpoint),
            "weights": lambda: _weights(view, checkpoint, marker),
        }
    )


def _files(view: RunView, checkpoint: CheckpointView, marker: CompleteMarker) -> Iterator[Finding]:
    listed = {entry.path: entry for entry in marker.files}
    for name in sorted({MODEL_FILE, *JSON_FILES} - listed.keys()):
        yield error(
            "The marker does not list a file that every checkpoint has.",
            f"{checkpoint.marker.where} files",
            expected=name,
        )
    if len(listed) != len(marker.files):
        yield error("The marker lists a file twice.", f"{checkpoint.marker.where} files")
    for name in sorted(set(checkpoint.found_files) - listed.keys() - {MARKER_FILE}):
        yield error("A file that the marker does not list.", checkpoint.path(name))
    present = [name for name in sorted(listed) if view.files.is_file(checkpoint.path(name))]
    for name in sorted(listed.keys() - set(present)):
        yield error("A file that the marker lists is missing.", checkpoint.path(name))
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        hashes = list(pool.map(lambda name: reader.hash_file(view.root / checkpoint.path(name)), present))
    for name, (num_bytes, digest) in zip(present, hashes, strict=True):
        entry = listed[name]
        if num_bytes != entry.bytes:
            yield error("The size of a file differs.", checkpoint.path(name), expected=entry.bytes, got=num_bytes)
        elif digest != entry.sha256:
            yield error("The content of a file differs.", checkpoint.path(name), expected=entry.sha256, got=digest)


def _identity(view: RunView, checkpoint: CheckpointView, marker: CompleteMarker) -> Iterator[Finding]:
    """The marker's own digest, as file, as value and as the last save announced it."""
    where = checkpoint.marker.where
    digest = reader.hash_file(view.root / where)[1]
    yield from differs(
        "The form of the marker: the digest of its bytes", where, expected=marker.complete_digest, got=digest
    )
    yield from differs("The update of the marker", f"{where} update", expected=checkpoint.update, got=marker.update)
    saved = [
        (logged, logged.meta)
        for logged in view.events.get().of(EventKey.CHECKPOINT_SAVED)
        if logged.event.update == checkpoint.update and isinstance(logged.meta, CheckpointSaved)
    ]
    if not saved:
        yield error("No event says that the final checkpoint was saved.", where)
    for logged, meta in saved[-1:]:
        yield from differs(
            "The final checkpoint's digest",
            f"{logged.where} meta.complete_digest",
            expected=marker.complete_digest,
            got=meta.complete_digest,
        )
        yield from differs(
            "The weights' digest",
            f"{logged.where} meta.weights_digest",
            expected=marker.weights_digest,
            got=meta.weights_digest,
        )
    for end in view.events.get().of(EventKey.RUN_END)[-1:]:
        got = getattr(end.meta, "complete_digest", None)
        yield from differs(
            "The final checkpoint's digest",
            f"{end.where} meta.complete_digest",
            expected=marker.complete_digest,
            got=got,
        )


def _optimizer(view: RunView, checkpoint: CheckpointView) -> Iterator[Finding]:
    """Every state that the index names is in its file, of that shape, and nothing else is."""
    assert checkpoint.index is not None
    index = checkpoint.index.get()
    expected: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, parameter in index.parameters.items():
        states = {f"{name}::{state}": (entry.dtype, entry.shape) for state, entry in parameter.states.items()}
        expected.setdefault(parameter.file, {}).update(states)
    present = {
        name for name in checkpoint.found_files if name.startswith("optimizer_") and name.endswith(".safetensors")
    }
    for file in sorted(expected.keys() | present):
        path = checkpoint.path(file)
        if "/" in file or not view.files.is_file(path):
            yield error("The optimizer index names a file that is not there.", checkpoint.index.where, got=file)
            continue
        try:
            header = reader.read_safetensors_header(view.root / path)
        except reader.Malformed as problem:
            yield error(f"The file {problem}", path)
            continue
        found = {key: (entry.dtype, list(entry.shape)) for key, entry in header.tensors.items()}
        wrong = sorted(
            key
            for key in found.keys() | expected.get(file, {}).keys()
            if found.get(key) != expected.get(file, {}).get(key)
        )
        if wrong:
            yield error(f"{len(wrong)} optimizer states are not as the index says.", path, got=wrong[0])


def _weights(view: RunView, checkpoint: CheckpointView, marker: CompleteMarker) -> Iterator[Finding]:
    """The digest of the weights from their bytes."""
    assert checkpoint.header is not None
    header, path = checkpoint.header.get(), view.root / checkpoint.path(MODEL_FILE)
    with reader.open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        whole = memoryview(content)

        def describe(name: str) -> tuple[str, str, tuple[int, ...], str]:
            entry = header.tensors[name]
            with whole[entry.start : entry.end] as part:
                return name, entry.dtype, entry.shape, hashlib.sha256(part).hexdigest()

        with ThreadPoolExecutor(HASH_THREADS) as pool:
            hashes = list(pool.map(describe, header.tensors))
        whole.release()
    got = combine_tensor_hashes(hashes)
    if got != marker.weights_digest and not _is_damaged(view, checkpoint, marker):
        yield error(
            "The digest of the weights differs.",
            f"{checkpoint.marker.where} weights_digest",
            expected=got,
            got=marker.weights_digest,
        )


def _is_damaged(view: RunView, checkpoint: CheckpointView, marker: CompleteMarker) -> bool:
    """Whether the file itself differs from the marker, which is reported already."""
    entry = next((entry for entry in marker.files if entry.path == MODEL_FILE), None)
    return entry is None or reader.hash_file(view.root / checkpoint.path(MODEL_FILE)) != (entry.bytes, entry.sha256)
