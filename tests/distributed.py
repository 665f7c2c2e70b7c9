"""Runs a function in several gloo processes on this machine, quickly: a forkserver with torch preloaded."""

import importlib.util
import inspect
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

LIMIT_SECONDS = 120.0
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "nexttransformer.training.attempt"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


class RanksFailed(AssertionError):
    """A process raised, died or took too long. `exit_codes` has one entry per rank (None: ended by the limit)."""

    def __init__(self, message: str, exit_codes: list[int | None]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    limit_seconds: float = LIMIT_SECONDS,
    with_group: bool = True,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Calls `function(rank, world_size, *arguments)` in `world_size` processes and returns their results by rank.

    Args:
        function: defined at the top level of a file; each process loads that file.
        world_size: number of processes.
        arguments: picklable, of types that other processes can import.
        limit_seconds: after it the processes are ended and the test fails.
        with_group: also make the default gloo group; else only the variables that a launcher sets
            (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        environment: more variables.

    Raises:
        RanksFailed: with the tracebacks; only processes started here are ended.
    """
    file = inspect.getsourcefile(function)
    assert file is not None and "<locals>" not in function.__qualname__, "use a function of the file's top level"
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **(environment or {}),
    }
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            store = str(Path(folder) / "store") if with_group else None
            process = _context.Process(
                target=_child, args=(sender, file, function.__qualname__, store, variables, arguments), daemon=False
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            outcomes = _collect(pipes, time.monotonic() + limit_seconds)
            for process in processes:
                process.join(timeout=5.0)
        finally:
            codes = [process.exitcode for process in processes]
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    problems = [
        f"rank {rank} (exit code {codes[rank]}):\n{outcome[1] if outcome else 'no result: died or took too long'}"
        for rank, outcome in enumerate(outcomes)
        if outcome is None or not outcome[0]
    ]
    if problems:
        raise RanksFailed("\n".join(problems), codes)
    return [outcome[1] for outcome in outcomes if outcome is not None]


def _collect(pipes: list[Connection], limit: float) -> list[tuple[bool, Any] | None]:
    """Returns (succeeded, result or traceback) per rank; None for one that died or is late."""
    outcomes: list[tuple[bool, Any] | None] = [None] * len(pipes)
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < limit:
        for ready in wait(list(waiting.values()), timeout=max(0.0, limit - time.monotonic())):
            rank = next(rank for rank, pipe in waiting.items() if pipe is ready)
            try:
                outcomes[rank] = pipes[rank].recv()
            except EOFError:
                # Died: the others may wait for it in a collective.
                limit = min(limit, time.monotonic() + 10.0)
            del waiting[rank]
            outcome = outcomes[rank]
            if outcome is not None and not outcome[0]:
                limit = min(limit, time.monotonic() + 10.0)
    return outcomes


def _child(
    sender: Any, file: str, name: str, store: str | None, variables: dict[str, str], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if store is not None:
            limit = timedelta(seconds=60)
            dist.init_process_group("gloo", f"file://{store}", timeout=limit, rank=rank, world_size=world_size)
        result = getattr(_load(file), name)(rank, world_size, *arguments)
        sender.send((True, result))
    except BaseException:  # noqa: BLE001 - whatever it was goes to the test
        sender.send((False, traceback.format_exc()))
        os._exit(1)
    sender.close()
    # No teardown of groups: a peer may be gone already.
    os._exit(0)


def _load(file: str) -> ModuleType:
    module_name = f"_ranks_{Path(file).stem}"
    specification = importlib.util.spec_from_file_location(module_name, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    specification.loader.exec_module(module)
    return module
