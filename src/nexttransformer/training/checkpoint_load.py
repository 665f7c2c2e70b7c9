"""Loading checkpoints: into a training run, and for evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, join_problems
from nexttransformer.training import checkpoint_files as files
from nexttransformer.training.checkpoint_choice import Choice, read_state
from nexttransformer.training.checkpoint_schema import CompleteMarker, OptimizerIndex, ProtocolFile, TrainerState
from nexttransformer.training.collectives import Collectives, SingleProcess, on_all_ranks, on_rank0
from nexttransformer.training.optimizer_index import OptimizerState, expected_entries, index_keys
from nexttransformer.training.safetensors_file import SafetensorsReader
from nexttransformer.training.weights_digest import DTYPE_NAMES, find_difference, weights_digest

_MAX_PROBLEMS = 10


def load_checkpoint(
    choice: Choice, parameters: Mapping[str, Tensor], optimizer: OptimizerState, collectives: Collectives, host: str
) -> None:
    """Loads weights, optimizer state and its update count in place, by name, strictly both ways; collective.

    Files were verified by `choose_checkpoint`. Afterwards `weights_digest` is checked on rank 0 and
    the device checksum is compared over ranks.

    Raises:
        CheckpointError: names, shapes or dtypes differ (all differences together), or a digest does;
            the same on every rank.
    """
    path, marker, state = choice.path, choice.marker, choice.state
    assert path is not None and marker is not None and state is not None
    on_all_ranks(lambda: load_weights(path / files.MODEL_FILE, parameters), collectives)
    on_all_ranks(lambda: _load_optimizer(path, optimizer), collectives)
    optimizer.num_updates_done = state.optimizer_updates

    def check_digest() -> None:
        got = weights_digest(parameters)
        if got != marker.weights_digest:
            raise CheckpointError(
                f"{path}: the loaded weights have digest {got[:16]}..., the checkpoint's marker says "
                f"{marker.weights_digest[:16]}.... Check this machine's memory."
            )

    on_rank0(check_digest, collectives)
    difference = find_difference(parameters, collectives, host)
    if difference:
        raise CheckpointError(
            f"{path}: loaded weights are not the same on all ranks: {difference}. Check that machine."
        )


def load_weights(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Copies a safetensors file into parameters, in place; names, shapes and dtypes must agree both ways.

    Raises:
        CheckpointError: naming the differences together; then nothing was copied.
    """
    reader = SafetensorsReader(path)
    found = reader.layout()
    expected = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in parameters.items()}
    _compare(path, found, expected)
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(reader.get(name))


def _load_optimizer(path: Path, optimizer: OptimizerState) -> None:
    index = index_keys(OptimizerIndex.read(path / files.INDEX_FILE))
    found = {key: (entry.dtype, tuple(entry.shape)) for key, (_, entry) in index.items()}
    expected = {key: (entry.dtype, tuple(entry.shape)) for key, entry in expected_entries(optimizer).items()}
    _compare(path / files.INDEX_FILE, found, expected)
    readers: dict[str, SafetensorsReader] = {}

    def get(key: str) -> Tensor:
        file = index[key][0]
        if file not in readers:
            readers[file] = SafetensorsReader(path / file)
        return readers[file].get(key)

    optimizer.load_state(get)


def _compare(
    where: Path, found: Mapping[str, tuple[str, tuple[int, ...]]], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    problems = [f"{where}: '{name}' is missing." for name in expected if name not in found]
    problems += [f"{where}: '{name}' is not expected." for name in found if name not in expected]
    problems += [
        f"{where}: '{name}': expected {expected[name][0]} {list(expected[name][1])}, "
        f"found {found[name][0]} {list(found[name][1])}."
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"{where}: and {len(problems) - _MAX_PROBLEMS} more differences."]
    if problems:
        raise CheckpointError(join_problems(problems))


@dataclass(frozen=True)
class EvaluationCheckpoint:
    """All that an evaluation needs. `tensors` are CPU tensors by public name, mapped from the file."""

    path: Path
    marker: CompleteMarker
    complete_digest: str
    model_config: dict[str, Any]
    protocol: ProtocolFile
    state: TrainerState
    tensors: dict[str, Tensor]


def load_for_evaluation(path: Path, collectives: Collectives | None = None) -> EvaluationCheckpoint:
    """Reads a checkpoint anywhere on disk: all sizes are checked, and the SHA-256 of every file that is read.

    Args:
        path: the checkpoint folder, of any name.
        collectives: with several processes, to spread the hashing.

    Raises:
        CheckpointError: incomplete, damaged, or not a checkpoint; the file is named. Every rank raises or none.
    """
    collectives = collectives or SingleProcess()
    marker = on_rank0(lambda: files.read_marker(path), collectives)
    needed = [entry for entry in marker.files if entry.path in (files.MODEL_FILE, *files.JSON_FILES)]
    share = files.spread_files(needed, collectives.world_size)[collectives.rank]
    on_all_ranks(lambda: files.verify_files(path, share), collectives)
    reader = SafetensorsReader(path / files.MODEL_FILE)
    return EvaluationCheckpoint(
        path=path,
        marker=marker,
        complete_digest=marker.complete_digest,
        model_config=jsonio.read_json(path / files.CONFIG_FILE, CheckpointError),
        protocol=ProtocolFile.read(path / files.PROTOCOL_FILE),
        state=read_state(path, marker),
        tensors={name: reader.get(name) for name in reader.layout()},
    )
