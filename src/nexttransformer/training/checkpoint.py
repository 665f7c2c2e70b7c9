"""Saving a checkpoint: complete or not at all, whatever happens (atomic, several writers, marker last)."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nexttransformer.training import checkpoint_files as files
from nexttransformer.training import checkpoint_write as steps
from nexttransformer.training.checkpoint_schema import (
    CompleteMarker,
    FileEntry,
    ProtocolFile,
    StateEntry,
    TrainerState,
)
from nexttransformer.training.collectives import Collectives, on_all_ranks, on_rank0
from nexttransformer.training.optimizer_index import OptimizerState, build_index, expected_entries
from nexttransformer.training.safetensors_file import header_bytes, tensor_num_bytes
from nexttransformer.training.save_errors import SaveFailed, SaveRefused
from nexttransformer.training.weights_digest import find_difference

__all__ = ["OptimizerState", "SaveFailed", "SaveRefused", "SavedCheckpoint", "expected_bytes", "save_checkpoint"]

# Generous size of the JSON files of one checkpoint, and of one parameter in the optimizer index.
_JSON_BYTES = 65_536
_INDEX_ENTRY_BYTES = 512


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that exists. `num_bytes` without the marker; `seconds` from call to durable marker."""

    path: Path
    marker: CompleteMarker
    complete_digest: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Written:
    """What one rank wrote: its files, its optimizer states (key -> file, entry), the weights digest (rank 0)."""

    entries: list[FileEntry]
    states: dict[str, tuple[str, StateEntry]]
    weights_digest: str | None


def expected_bytes(parameters: Mapping[str, Tensor], optimizer: OptimizerState) -> int:
    """Estimates the size of one checkpoint in bytes, headers and JSON files included; the same on every rank."""
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()}
    state = dict(optimizer.expected_state())
    tensors = sum(tensor_num_bytes(shape, dtype) for shape, dtype in [*layout.values(), *state.values()])
    headers = len(header_bytes(layout, {})) + len(header_bytes(state, {}))
    return tensors + headers + _JSON_BYTES + _INDEX_ENTRY_BYTES * len(layout)


def save_checkpoint(
    root: Path,
    *,
    state: TrainerState,
    model_config: Mapping[str, Any],
    protocol: ProtocolFile,
    parameters: Mapping[str, Tensor],
    optimizer: OptimizerState,
    group_of: Mapping[str, str],
    collectives: Collectives,
    check_lock: Callable[[], None] = lambda: None,
    hook: Callable[[str], None] = lambda step: None,
) -> SavedCheckpoint:
    """Saves update `state.update` into `root/checkpoint_%08d`; collective, called by all ranks.

    Rank 0 writes the weights; every rank that holds optimizer state writes it, at the same time. The
    caller then writes `checkpoint_saved` and `run_state.json` and applies retention (rank 0).

    Args:
        root: the run folder, the same on all ranks.
        state: everything besides tensors; equal on all ranks.
        model_config: the expanded config.
        protocol: id, digest and constants.
        parameters: every parameter by its public name; equal bits on all ranks.
        optimizer: its state tensors are written by the ranks that hold them.
        group_of: optimizer group of every parameter.
        collectives: over a CPU group.
        check_lock: rank 0 calls it before it writes (`RunLock.check`).
        hook: called with a step's name after every file and step, for crash tests; may raise or kill.

    Returns:
        The same on every rank.

    Raises:
        SaveFailed: clean failure, on all ranks.
        SaveRefused: weights not finite, ranks differ (rank, host, tensor named) or lock lost, on all ranks.
    """
    assert state.optimizer_updates == optimizer.num_updates_done
    start = time.monotonic()
    final = root / files.checkpoint_name(state.update)
    partial = final.with_name(final.name + ".partial")
    rank, host = collectives.rank, socket.gethostname()
    check_weights(parameters, collectives, host)
    num_bytes = expected_bytes(parameters, optimizer)

    def prepare() -> None:
        steps.check_lock_is_ours(check_lock)
        steps.prepare_folder(final, partial, run_id=state.run_id, num_bytes=num_bytes)

    on_rank0(prepare, collectives)
    hook("partial_made")
    states = optimizer.state_tensors()
    counts = collectives.broadcast_object(collectives.gather_objects(len(states)))
    writers = [writer for writer, count in enumerate(counts) if count]

    def write() -> _Written:
        steps.wait_for_folder(partial, rank=rank, host=host)
        entries, digest, described = [], None, {}
        metadata = _metadata(state, protocol)
        if rank == 0:
            model = steps.write_tensor_file(partial, files.MODEL_FILE, parameters, metadata, rank=rank, host=host)
            entries.append(FileEntry(path=files.MODEL_FILE, bytes=model.num_bytes, sha256=model.sha256))
            digest = model.weights_digest
            hook(f"file:{files.MODEL_FILE}")
        if states:
            name = files.optimizer_file(writers.index(rank), len(writers))
            written = steps.write_tensor_file(partial, name, states, metadata, rank=rank, host=host)
            entries.append(FileEntry(path=name, bytes=written.num_bytes, sha256=written.sha256))
            described = steps.describe_states(name, states)
            hook(f"file:{name}")
        return _Written(entries, described, digest)

    try:
        written = on_all_ranks(write, collectives)
    except SaveFailed:
        # No rank writes any more, so rank 0 can remove everybody's files with the folder.
        on_rank0(lambda: steps.discard(partial), collectives)
        raise
    gathered = collectives.gather_objects(written)
    hook("gathered")

    def finish() -> SavedCheckpoint:
        assert gathered is not None and written.weights_digest is not None
        index = build_index([part.states for part in gathered], expected_entries(optimizer), group_of)
        marker = steps.finish_folder(
            final,
            partial,
            state=state,
            protocol=protocol,
            entries=[entry for part in gathered for entry in part.entries],
            weights_digest=written.weights_digest,
            contents={
                files.INDEX_FILE: index.to_json(),
                files.STATE_FILE: state.to_json(),
                files.CONFIG_FILE: dict(model_config),
                files.PROTOCOL_FILE: protocol.to_json(),
            },
            check_lock=check_lock,
            hook=hook,
        )
        seconds = time.monotonic() - start
        return SavedCheckpoint(final, marker, marker.complete_digest, marker.num_bytes, seconds)

    return on_rank0(finish, collectives)


def check_weights(parameters: Mapping[str, Tensor], collectives: Collectives, host: str) -> None:
    """Raises SaveRefused, on all ranks, if weights are not finite or not the same bits on all ranks."""

    def check_finite() -> None:
        # One read from the device for all tensors.
        finite = torch.stack([torch.isfinite(tensor.detach()).all() for tensor in parameters.values()]).tolist()
        bad = [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]
        if bad:
            raise SaveRefused(
                f"Weights are not finite on rank {collectives.rank} ({host}): {', '.join(bad[:3])}. Not saved; the run "
                "ends. The newest complete checkpoint is untouched.",
                "nonfinite_weights",
            )

    on_all_ranks(check_finite, collectives)
    difference = find_difference(parameters, collectives, host)
    if difference:
        raise SaveRefused(
            f"Weights are not the same on all ranks: {difference}. Not saved; the run ends. Check that machine, then "
            "repeat the command to continue from the newest complete checkpoint.",
            "ranks_differ",
        )


def _metadata(state: TrainerState, protocol: ProtocolFile) -> dict[str, str]:
    return {
        "run_id": state.run_id,
        "mode": state.mode,
        "method": state.method,
        "protocol": protocol.id,
        "update": str(state.update),
    }
