"""Every process says who it is before any group is made: a doubled or missing rank has a name, not a timeout."""

from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from nexttransformer.errors import NodeError
from nexttransformer.training.process_place import ProcessPlace

_PREFIX = "nexttransformer/roll"
_VERDICT = f"{_PREFIX}/verdict"
_PRESENT = f"{_PREFIX}/present"
_ALL_PRESENT = "all present"
_MAX_SHOWN = 8


def call_roll(store: Store, place: ProcessPlace, host: str, *, limit_seconds: float) -> None:
    """Waits until every rank of the job is there exactly once. Every process calls it, once per launch.

    Args:
        store: the key-value store the processes meet at, new for this launch.
        place: what the launcher says about this process.
        host: name of this node.
        limit_seconds: how long others may be late.

    Raises:
        NodeError: if a rank comes twice (both hosts are named, on all ranks that are there), or does not come.
    """
    number = store.add(f"{_PREFIX}/claims/{place.rank}", 1)
    store.set(f"{_PREFIX}/host/{place.rank}/{number}", host)
    if number > 1:
        first = store.get(f"{_PREFIX}/host/{place.rank}/1").decode()
        where = f"by two launchers on {host}" if first == host else f"by {first} and by {host}"
        node = "" if place.node_rank is None else f" (node rank {place.node_rank})"
        verdict = f"Rank {place.rank}{node} is used twice, {where}. Give every node its own rank from 0."
        store.set(_VERDICT, verdict)
        raise NodeError(verdict)
    if store.add(_PRESENT, 1) == place.world_size:
        store.set(_VERDICT, _ALL_PRESENT)
    try:
        store.wait([_VERDICT], timedelta(seconds=limit_seconds))
    except (RuntimeError, OSError) as error:
        raise NodeError(_missing(store, place, host, limit_seconds)) from error
    verdict = store.get(_VERDICT).decode()
    if verdict != _ALL_PRESENT:
        raise NodeError(verdict)


def _missing(store: Store, place: ProcessPlace, host: str, limit_seconds: float) -> str:
    """Returns who is not there, or that the store itself is gone."""
    waited = f"within {limit_seconds:.0f} s (said by rank {place.rank} on {host})"
    try:
        missing = [rank for rank in range(place.world_size) if not store.check([f"{_PREFIX}/host/{rank}/1"])]
    except (RuntimeError, OSError):
        return f"The launcher of node 0 at {place.address}:{place.port} is gone {waited}."
    shown = ", ".join(map(str, missing[:_MAX_SHOWN])) + (", ..." if len(missing) > _MAX_SHOWN else "")
    return (
        f"{len(missing)} of {place.world_size} processes did not come {waited}: ranks {shown}. "
        "Check that every node runs and sees the same job."
    )
