"""The process group: device choice, connection with short limits, timeouts by phase, agreement of all ranks."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nexttransformer.errors import EXIT_USAGE, NodeError
from nexttransformer.training.collectives import Collectives, GroupCollectives, SingleProcess
from nexttransformer.training.process_place import ProcessPlace
from nexttransformer.training.roll_call import call_roll

_NETWORK_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


class KeyValueStore(Protocol):
    """What the watchdog asks of the store at which the processes met (`torch.distributed.Store`)."""

    def set_timeout(self, timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, by phase of an attempt. Tests shorten them."""

    rendezvous: float = 600
    connection_test: float = 120
    first_updates: float = 1800
    updates: float = 300
    control: float = 1800
    folder: float = 60
    # No sign of life of a rank's process.
    heartbeat: float = 45
    beat: float = 5
    # No update for max(this, 20 x median): see the watchdog.
    stall: float = 300
    retry_final_save: float = 60
    num_final_save_retries: int = 10
    lock_watch: float = 60


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank, world_size: from 0; number of processes.
        local_rank, node_rank, num_nodes: place on this node, of this node, number of nodes.
        device: where the model lives.
        host: this node's name, for messages only (never written unhashed).
        control: small objects, on a CPU group.
        store: the key-value store the processes met at, for signs of life; None for one process.
        group: process group of the device's collectives; None for one process.
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    device: torch.device
    host: str
    control: Collectives
    store: KeyValueStore | None = None
    group: dist.ProcessGroup | None = None
    limits: Limits = Limits()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    def sum_vector(self, vector: Tensor) -> Tensor:
        """Sums a small float64 vector over all ranks, in place, on the device."""
        if self.group is not None:
            dist.all_reduce(vector, group=self.group)
        return vector


def choose_device(place: ProcessPlace) -> torch.device:
    """Returns the device of this process: its GPU, or the CPU where none is visible.

    With one visible GPU a process it is device 0.

    Raises:
        NodeError: if a GPU machine has a torch without CUDA, or there are fewer GPUs than processes.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None and torch.version.hip is None and Path("/dev/nvidiactl").exists() and not hidden:
        raise NodeError(
            f"This machine has NVIDIA GPUs, but torch {torch.__version__} has no CUDA. Run: bash launch/install.sh "
            "--gpu (or, to train on the CPU on purpose, export CUDA_VISIBLE_DEVICES=)."
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_visible = torch.cuda.device_count()
    index = 0 if num_visible == 1 else place.local_rank
    num_needed = place.local_world_size or place.local_rank + 1
    if num_visible > 1 and num_needed > num_visible:
        raise NodeError(f"{num_needed} processes on this node, but only {num_visible} GPUs are visible. Start fewer.")
    return torch.device("cuda", index)


def prepare_device(device: torch.device, logs: Path | None = None) -> None:
    """Sets this process's device and exact float32 products (no TF32) explicitly, and where NCCL dumps go."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL's flight recorder (on by default): what every rank was doing when a collective timed out.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if logs is not None:
            for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
                os.environ.setdefault(name, str(logs / "nccl_trace_rank_"))


def connect(place: ProcessPlace, limits: Limits, logs: Path | None = None) -> World:
    """Meets the other processes and proves with one tiny reduction that all can talk.

    Raises:
        NodeError: if they cannot, naming host, address, port and the network variables.
    """
    device = choose_device(place)
    prepare_device(device, logs)
    host = socket.gethostname()
    alone = World(place.rank, 1, place.local_rank, 0, 1, device, host, SingleProcess(), limits=limits)
    if place.world_size == 1:
        return alone
    with _connection_report(place, host, limits):
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=limits.rendezvous)))
        call_roll(store, place, host, limit_seconds=limits.rendezvous)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limits.first_updates),
            device_id=device if device.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limits.control))
        group = dist.group.WORLD
        assert group is not None and isinstance(control, dist.ProcessGroup)
    # A second connection: the watchdog's thread must not wait for calls of the first.
    own_store: Any = store
    world = replace(
        alone,
        rank=rank,
        world_size=world_size,
        control=GroupCollectives(control),
        store=own_store.clone(),
        group=group,
    )
    _test_connection(world, place)
    return _count_nodes(world, place)


def _describe(place: ProcessPlace, host: str) -> str:
    variables = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in _NETWORK_VARIABLES)
    return f"rank {place.rank} of {place.world_size} on {host}, address {place.address}, port {place.port}, {variables}"


@contextmanager
def _connection_report(place: ProcessPlace, host: str, limits: Limits) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise NodeError(
            f"The processes could not meet within {limits.rendezvous:.0f} s ({_describe(place, host)}): {reason}. "
            "Check that every node runs, and that address and port are reachable."
        ) from error


def _test_connection(world: World, place: ProcessPlace) -> None:
    """One all-reduce on the device and one on the CPU group, under a short limit of their own."""
    limit = world.limits.connection_test
    message = (
        f"A test reduction over all processes failed ({_describe(place, world.host)}). "
        "Check firewall and network interface; NCCL_SOCKET_IFNAME names the interface to use."
    )

    def give_up() -> NoReturn:
        # The main thread may be inside a call that no exception can leave.
        print(f"{message} No answer within {limit:.0f} s.", flush=True)
        os._exit(EXIT_USAGE)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        total = world.sum_vector(torch.ones(1, dtype=torch.float64, device=world.device)).item()
        world.control.barrier()
    except RuntimeError as error:
        raise NodeError(f"{message} {str(error).splitlines()[0]}") from error
    finally:
        timer.cancel()
    if total != world.world_size:
        raise NodeError(f"{message} Sum of ones: got {total}, expected {world.world_size}.")


def _count_nodes(world: World, place: ProcessPlace) -> World:
    """Numbers the nodes: by the launcher's node rank where it gives one, else by host name."""
    mine = (place.node_rank, world.host)
    all_nodes = world.control.broadcast_object(world.control.gather_objects(mine))
    nodes = list(dict.fromkeys(node if node[0] is None else (node[0], "") for node in all_nodes))
    key = mine if mine[0] is None else (mine[0], "")
    return replace(world, node_rank=nodes.index(key), num_nodes=len(nodes))


def broadcast_parameters(world: World, module: torch.nn.Module) -> None:
    """Gives every rank rank 0's parameters, in place."""
    if world.group is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                dist.broadcast(parameter, group_src=0, group=world.group)


def set_update_timeout(world: World, seconds: float) -> None:
    """Sets the limit of the device group's collectives (compilation is over; a hang should show soon)."""
    if world.group is not None:
        # The only way torch offers; torchtitan uses it too.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), world.group)


def disconnect(world: World, *, is_clean: bool) -> None:
    """Leaves the process group. After a failure no collective may be issued, so it is only dropped."""
    if world.group is None or not dist.is_initialized():
        return
    if is_clean:
        world.control.barrier()
        dist.destroy_process_group()
    elif world.device.type != "cuda":
        # Closes the connections, which ends the others' waiting; NCCL's would wait for its peers.
        dist.destroy_process_group()
