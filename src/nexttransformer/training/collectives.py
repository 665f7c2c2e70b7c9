"""The four collectives that saving, loading and evaluating need, all on a CPU group."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from nexttransformer.errors import NextTransformerError

Result = TypeVar("Result")


class Collectives(Protocol):
    """What checkpoint code asks of the process group. Objects are pickled; keep them small."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks, in rank order, on rank 0; None elsewhere."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's value on every rank; other ranks' argument is ignored."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...


class SingleProcess:
    """Collectives of one process."""

    rank = 0
    world_size = 1

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Returns [value]."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Returns the value."""
        return value

    def barrier(self) -> None:
        """Returns at once."""


class GroupCollectives:
    """Collectives over a CPU (gloo) process group; None is the default group."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks on rank 0, None elsewhere."""
        values = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""
        values = [value if self.rank == 0 else None]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        dist.barrier(group=self._group)


def on_rank0(function: Callable[[], Result], collectives: Collectives) -> Result:
    """Runs `function` on rank 0 alone; its (picklable) result, or its error, comes back on every rank.

    Raises:
        NextTransformerError: rank 0's, on all ranks.
    """
    outcome = None
    if collectives.rank == 0:
        outcome = _outcome_of(function)
    value, error = collectives.broadcast_object(outcome)
    if error is not None:
        raise error
    return value


def on_all_ranks(function: Callable[[], Result], collectives: Collectives) -> Result:
    """Runs `function` on every rank and returns each rank its own result.

    Raises:
        NextTransformerError: that of the lowest rank that has one, on all ranks.
    """
    value, error = _outcome_of(function)
    errors = collectives.gather_objects(error)
    first = None if errors is None else next((item for item in errors if item is not None), None)
    first = collectives.broadcast_object(first)
    if first is not None:
        raise first
    return cast(Result, value)


def all_agree(condition: bool, collectives: Collectives) -> bool:
    """Returns on every rank whether the condition holds on all ranks."""
    found = collectives.gather_objects(condition)
    return collectives.broadcast_object(None if found is None else all(found))


def _outcome_of(function: Callable[[], Result]) -> tuple[Result | None, NextTransformerError | None]:
    try:
        return function(), None
    except NextTransformerError as error:
        return None, error
