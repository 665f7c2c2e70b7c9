"""Optimizer state in a checkpoint: what is needed of the optimizer, and the index parameter -> file."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from nexttransformer.training.checkpoint_schema import OptimizerIndex, ParameterEntry, StateEntry
from nexttransformer.training.weights_digest import DTYPE_NAMES

KEY_SEPARATOR = "::"


class OptimizerState(Protocol):
    """What saving and loading need of the optimizer (see `optim.optimizer.Optimizer`)."""

    num_updates_done: int

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what this rank must write, by `<parameter>::<state>`; each key on exactly one rank."""
        ...

    def expected_state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of every key of all ranks together."""
        ...

    def load_state(self, get: Callable[[str], Tensor]) -> None:
        """Takes what this rank needs; `get` returns a whole CPU tensor by key."""
        ...


def expected_entries(optimizer: OptimizerState) -> dict[str, StateEntry]:
    """Returns the expected state of all ranks in the form the index has."""
    return {
        key: StateEntry(dtype=DTYPE_NAMES[dtype], shape=list(shape))
        for key, (shape, dtype) in optimizer.expected_state().items()
    }


def build_index(
    written: list[dict[str, tuple[str, StateEntry]]], expected: Mapping[str, StateEntry], group_of: Mapping[str, str]
) -> OptimizerIndex:
    """Joins what the ranks wrote into one index.

    Args:
        written: per rank, key -> (file, entry).
        expected: every key of all ranks.
        group_of: optimizer group of every parameter.

    Returns:
        The index; it covers every parameter of `group_of` exactly once.

    Raises:
        AssertionError: a key is missing, doubled, unexpected or of another shape; or a parameter's state
            is spread over files. These are bugs of the optimizer.
    """
    found: dict[str, tuple[str, StateEntry]] = {}
    for share in written:
        doubled = sorted(found.keys() & share.keys())
        assert not doubled, f"optimizer state written by two ranks: {doubled[:3]}"
        found.update(share)
    wrong = sorted(key for key in {*found, *expected} if key not in found or found[key][1] != expected.get(key))
    assert not wrong, f"optimizer state is missing, unexpected or of another shape: {wrong[:3]}"
    parameters: dict[str, ParameterEntry] = {}
    for name, group in group_of.items():
        keys = [key for key in found if key.rpartition(KEY_SEPARATOR)[0] == name]
        files = sorted({found[key][0] for key in keys})
        assert len(files) == 1, f"state of {name}: expected in one file, found in {files}"
        states = {key.rpartition(KEY_SEPARATOR)[2]: found.pop(key)[1] for key in keys}
        parameters[name] = ParameterEntry(file=files[0], group=group, states=states)
    assert not found, f"optimizer state of unknown parameters: {sorted(found)[:3]}"
    return OptimizerIndex(parameters=parameters)


def index_keys(index: OptimizerIndex) -> dict[str, tuple[str, StateEntry]]:
    """Returns every key of an index -> (file, entry)."""
    return {
        f"{name}{KEY_SEPARATOR}{state}": (parameter.file, entry)
        for name, parameter in index.parameters.items()
        for state, entry in parameter.states.items()
    }
