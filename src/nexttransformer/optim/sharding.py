"""Who computes which Muon unit: owners, and the batches ("rounds") in which results are exchanged.

Everything here is a pure function of names, shapes and world size, so all ranks agree without
talking to each other and a run may resume at any world size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod

from nexttransformer.optim.muon import unit_cost

# Limit of one rank's matrices in one round (fp32 bytes). It bounds the temporary memory of a round
# to about three times this, plus what the other ranks send, and fills a large GPU with work.
ROUND_BYTES = 2**27


@dataclass(frozen=True)
class Stack:
    """Muon parameters of equal unit shape that one rank updates in one batch.

    Attributes:
        names: their names.
        num_units: units of each (1 for a matrix, E for a stacked [E, m, n] tensor).
        num_rows: m.
        num_columns: n.
    """

    names: tuple[str, ...]
    num_units: tuple[int, ...]
    num_rows: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the batch: [units, m, n]."""
        return (sum(self.num_units), self.num_rows, self.num_columns)

    @property
    def num_elements(self) -> int:
        """Elements of the batch."""
        return prod(self.shape)


def assign_to_ranks(loads: Mapping[str, int], *, world_size: int, initial: list[int] | None = None) -> dict[str, int]:
    """Gives each item, heaviest first (ties by name), to the least loaded rank (ties to the lowest).

    Args:
        loads: load of each item, in any unit.
        world_size: number of ranks.
        initial: load each rank has beforehand; nothing if left out.

    Returns:
        The rank of each item.
    """
    totals = list(initial) if initial else [0] * world_size
    owners = {}
    for name in sorted(loads, key=lambda name: (-loads[name], name)):
        rank = min(range(world_size), key=lambda rank: (totals[rank], rank))
        owners[name] = rank
        totals[rank] += loads[name]
    return owners


def muon_cost(shape: tuple[int, ...]) -> int:
    """Returns the cost of a Muon parameter [m, n] or [E, m, n], proportional to its FLOPs.

    The units of a stacked tensor share an owner, so that their state is saved as one whole tensor.
    """
    *stack, num_rows, num_columns = shape
    return prod(stack) * unit_cost(num_rows, num_columns)


def plan_rounds(
    shapes: Mapping[str, tuple[int, ...]], owners: Mapping[str, int], *, world_size: int, round_bytes: int
) -> list[list[list[Stack]]]:
    """Splits every rank's parameters into rounds of bounded size, and each round into stacks.

    Args:
        shapes: shape of each Muon parameter.
        owners: rank of each.
        world_size: number of ranks.
        round_bytes: limit of one rank's fp32 bytes in a round; a larger single parameter gets its own round.

    Returns:
        rounds[i][rank] is the list of stacks that the rank computes in round i (maybe empty). Heavy
        parameters come first on every rank, so the ranks' shares of a round are alike.
    """
    rounds: list[list[list[str]]] = []
    for rank in range(world_size):
        index, used = 0, 0
        for name in sorted((name for name in shapes if owners[name] == rank), key=lambda name: _order(name, shapes)):
            size = 4 * prod(shapes[name])
            if used and used + size > round_bytes:
                index, used = index + 1, 0
            if index == len(rounds):
                rounds.append([[] for _ in range(world_size)])
            rounds[index][rank].append(name)
            used += size
    return [[_stacks(names, shapes) for names in ranks] for ranks in rounds]


def _order(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, tuple[int, ...], str]:
    num_rows, num_columns = shapes[name][-2:]
    return (-unit_cost(num_rows, num_columns), (num_rows, num_columns), name)


def _stacks(names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Stack]:
    stacks = []
    for (num_rows, num_columns), members in groupby(names, key=lambda name: shapes[name][-2:]):
        chosen = tuple(members)
        stacks.append(Stack(chosen, tuple(prod(shapes[name][:-2]) for name in chosen), num_rows, num_columns))
    return stacks
