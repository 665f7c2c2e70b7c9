"""Worker processes: order, look-ahead, death of a worker, death of the parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nexttransformer.data.workers import Workers
from nexttransformer.errors import DataError

PARENT = """
from nexttransformer.data.workers import Workers
import tests.data.test_workers as here
if __name__ == "__main__":
    with Workers(2) as workers:
        for pid in workers.map(here.report_and_wait, [0.0, 0.0, 600.0, 600.0]):
            print(pid, flush=True)
"""


def square(value: int) -> int:
    time.sleep(0.02 * (value % 3 == 0))
    return value * value


def die(value: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def report_and_wait(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def refuse(value: int) -> int:
    raise DataError(f"task {value} is bad")


def test_results_come_in_order_and_tasks_are_drawn_only_a_little_ahead() -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for value in range(30):
            drawn.append(value)
            yield value

    with Workers(2) as workers:
        results = workers.map(square, tasks())
        assert next(results) == 0
        assert len(drawn) <= 5
        assert list(results) == [value * value for value in range(1, 30)]
        # A user error in a worker arrives as it was raised; the pool lives on.
        with pytest.raises(DataError, match="task 7 is bad"):
            list(workers.map(refuse, [7]))
        assert list(workers.map(square, [3])) == [9]


def test_a_killed_worker_is_said() -> None:
    with Workers(2) as workers, pytest.raises(DataError, match="worker process died"):
        list(workers.map(die, [1]))


def test_workers_end_with_a_killed_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()) for _ in range(2)}
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} still run"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
