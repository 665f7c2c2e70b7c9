"""Checks over all ranks before any data is loaded: layout, one shared output folder, equal software and inputs."""

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import CheckpointError, ConfigError, join_problems
from nexttransformer.training.collectives import on_all_ranks, on_rank0
from nexttransformer.training.distributed import World
from nexttransformer.training.process_place import ProcessPlace

# Rows that may differ between nodes without refusing the run; they are printed as a warning.
_MAY_DIFFER = frozenset({"driver", "gpu"})


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs; `host` is a node's name."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    device: str


def check_layout(world: World, place: ProcessPlace, num_rows: int) -> list[RankPlace]:
    """Checks that the effective job is the intended one and returns the place of every rank.

    Raises:
        ConfigError: unequal processes per node, one node rank on two hosts, one device used twice,
            more processes than rows.
    """
    own = RankPlace(world.rank, world.local_rank, world.node_rank, world.host, str(world.device))
    places = world.control.broadcast_object(world.control.gather_objects(own))
    problems = layout_problems(places, num_nodes=place.num_nodes, num_rows=num_rows)
    if problems:
        raise ConfigError(join_problems(problems))
    return places


def layout_problems(places: list[RankPlace], *, num_nodes: int | None, num_rows: int) -> list[str]:
    """Returns what is wrong with the places of all ranks, one line each.

    Args:
        places: of every rank.
        num_nodes: what the launcher says, None if it does not.
        num_rows: rows of an update.
    """
    problems = []
    world_size = len(places)
    if world_size > num_rows:
        problems.append(
            f"{world_size} processes, but an update has only {num_rows} rows: each needs at least one. Start fewer."
        )
    per_node = Counter(place.node_rank for place in places)
    if len(set(per_node.values())) > 1:
        hosts = {place.node_rank: place.host for place in places}
        counts = ", ".join(f"{hosts[node]} (node {node}): {count}" for node, count in sorted(per_node.items()))
        problems.append(f"Unequal numbers of processes per node: {counts}. Start the same number on every node.")
    if num_nodes is not None and len(per_node) != num_nodes:
        problems.append(f"{len(per_node)} nodes answered, the launcher announced {num_nodes}. Start every node.")
    for node in sorted(per_node):
        hosts = sorted({place.host for place in places if place.node_rank == node})
        if len(hosts) > 1:
            problems.append(f"Node rank {node} is used by {' and '.join(hosts)}. Give every node its own rank.")
    used = Counter((place.host, place.device) for place in places if place.device != "cpu")
    problems += [
        f"{count} processes on {host} use {device}. Make one GPU visible to each, or all GPUs to all."
        for (host, device), count in sorted(used.items())
        if count > 1
    ]
    return problems


def check_shared_folder(world: World, root: Path) -> None:
    """Proves that all nodes see one output folder: rank 0 writes a nonce there, everybody must read it.

    Raises:
        CheckpointError: if a node does not see it in time (the host is named) or it cannot be written.
    """
    if world.world_size == 1:
        return
    nonce = secrets.token_hex(16)
    path = root / f".nonce_{nonce}"

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.write_text(nonce, encoding="ascii")
        except OSError as error:
            raise CheckpointError(
                f"--output {root}: cannot be written: {error.strerror}. Use another folder."
            ) from None
        return nonce

    expected = on_rank0(write, world.control)

    def read() -> None:
        deadline = time.monotonic() + world.limits.folder
        while not _holds(root / f".nonce_{expected}", expected):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"--output {root}: rank {world.rank} on {world.host} does not see what rank 0 wrote there within "
                    f"{world.limits.folder:.0f} s. Every node needs the same folder on a shared file system."
                )
            time.sleep(0.05)

    try:
        on_all_ranks(read, world.control)
    finally:
        if world.is_main:
            path.unlink(missing_ok=True)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="ascii") == text
    except OSError:
        return False


def check_equal(world: World, facts: Mapping[str, str | None]) -> list[str]:
    """Compares facts over all ranks; returns warnings for the rows that may differ.

    Args:
        world: all ranks.
        facts: name -> value on this rank: versions and digests.

    Raises:
        ConfigError: a table of the rows that differ and must not.
    """
    mine = {"host": world.host, **{name: str(value) for name, value in facts.items()}}
    gathered = world.control.broadcast_object(world.control.gather_objects(mine))
    different = [name for name in facts if len({each[name] for each in gathered}) > 1]
    refused = [name for name in different if name not in _MAY_DIFFER]
    if refused:
        raise ConfigError(
            "The ranks differ and must not:\n"
            + difference_table(gathered, refused)
            + "\nInstall the same versions and give every node the same files, then repeat the command."
        )
    return [f"The ranks differ in {name}:\n{difference_table(gathered, [name])}" for name in different]


def difference_table(gathered: list[dict[str, str]], names: list[str]) -> str:
    """Returns one line per differing value: name, value, and the ranks and hosts that have it."""
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(gathered):
            holders.setdefault(each[name], []).append(rank)
        for value, ranks in holders.items():
            hosts = ", ".join(dict.fromkeys(gathered[rank]["host"] for rank in ranks))
            shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            lines.append(f"  {name:<16} {value[:64]:<64} ranks {shown} ({hosts})")
    return "\n".join(lines)
