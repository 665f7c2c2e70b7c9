"""Worker processes that answer in order, with a bounded number of tasks in flight."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TypeVar

from nexttransformer.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


def default_num_workers() -> int:
    """Returns the processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A pool of processes, or this process itself when there is one worker."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields function(task) for each task, in order; tasks are drawn a little ahead of the results.

        Raises:
            DataError: if a worker process dies (killed, out of memory).
        """
        if self.num_workers == 1:
            for task in tasks:
                yield function(task)
            return
        if self._pool is None:
            # Spawned, not forked: a fork of a process with Rust or Arrow threads can hang.
            self._pool = ProcessPoolExecutor(
                self.num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker
            )
        pending: deque[Future[Result]] = deque()
        source = iter(tasks)
        try:
            while True:
                while len(pending) < 2 * self.num_workers:
                    try:
                        task = next(source)
                    except StopIteration:
                        break
                    pending.append(self._pool.submit(function, task))
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "A worker process died (killed or out of memory). Repeat the command with fewer --workers."
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _start_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends with it: a killed parent must leave no worker behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    parent.join()
    os._exit(1)
