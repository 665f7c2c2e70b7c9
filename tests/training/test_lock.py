import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nexttransformer.errors import CheckpointError
from nexttransformer.training.lock import LockHeld, LockLost, RunLock
from nexttransformer.training.lock_file import LockContent, host_hash, read_lock

FAST = {"attempt": 1, "beat_seconds": 0.05, "watch_seconds": 0.8}


def foreign_lock(path: Path, **changes: Any) -> LockContent:
    values = {
        "token": "f" * 32,
        "host": "0" * 16,
        "process_id": 1,
        "process_start": 0,
        "attempt": 0,
        "counter": 4,
        "beat_seconds": 15.0,
    }
    content = LockContent(**{**values, **changes})
    path.write_bytes(content.to_bytes())
    return content


def test_the_lock_names_its_holder_counts_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "new" / "train.lock"
    lock = RunLock.acquire(path, **FAST)
    first = read_lock(path)
    assert first is not None and first.process_id == os.getpid() and first.host == host_hash()
    assert first.attempt == 1
    limit = time.monotonic() + 10
    while time.monotonic() < limit and (now := read_lock(path)) == first:
        time.sleep(0.02)
    assert now is not None and now.counter > first.counter and now.token == first.token
    lock.check()
    lock.release()
    lock.release()
    assert list(path.parent.iterdir()) == []


def test_a_second_launch_refuses_in_one_line(tmp_path: Path) -> None:
    """F14: the counter moves."""
    path = tmp_path / "train.lock"
    lock = RunLock.acquire(path, **FAST)
    with pytest.raises(LockHeld) as caught:
        RunLock.acquire(path, **{**FAST, "watch_seconds": 20})
    text = str(caught.value)
    assert "\n" not in text and "seconds old" in text and f"on host {host_hash()}" in text
    assert f"process {os.getpid()}" in text
    lock.check()
    lock.release()


_HOLD = """
import sys, time
from pathlib import Path
from nexttransformer.training.lock import RunLock
RunLock.acquire(Path(sys.argv[1]), attempt=0)
print("held", flush=True)
time.sleep(100)
"""


def test_a_lock_of_a_killed_process_on_this_host_is_taken_at_once(tmp_path: Path) -> None:
    """F14: stale lock on the same host, also while the dead process is still a zombie."""
    path = tmp_path / "train.lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    holder.kill()
    # Not waited for: a zombie at first.
    start = time.monotonic()
    lock = RunLock.acquire(path, attempt=1, watch_seconds=60)
    assert time.monotonic() - start < 20
    holder.wait()
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_id_that_was_given_to_another_process_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "train.lock"
    foreign_lock(path, host=host_hash(), process_id=os.getpid(), process_start=1)
    start = time.monotonic()
    RunLock.acquire(path, attempt=1, watch_seconds=60).release()
    assert time.monotonic() - start < 20


def test_a_standing_counter_is_taken_over_after_the_watch(tmp_path: Path) -> None:
    """F14: another host, shortened time."""
    path = tmp_path / "train.lock"
    foreign_lock(path)
    start = time.monotonic()
    lock = RunLock.acquire(path, **FAST)
    assert time.monotonic() - start >= 0.8
    assert [file.name for file in tmp_path.iterdir()] == ["train.lock"]
    lock.check()
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{", b'{"token": 1}'])
def test_a_lock_of_a_launch_that_died_while_writing_it_is_taken_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.lock"
    path.write_bytes(content)
    RunLock.acquire(path, **{**FAST, "watch_seconds": 0.2}).release()


def test_a_moving_counter_of_another_host_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "train.lock"
    foreign_lock(path)
    timer = threading.Timer(0.2, lambda: foreign_lock(path, counter=5))
    timer.start()
    with pytest.raises(LockHeld, match=r"process 1 on host 0000000000000000, attempt 0, about 75 seconds old"):
        RunLock.acquire(path, **{**FAST, "watch_seconds": 20})
    timer.join()
    now = read_lock(path)
    assert now is not None and now.token == "f" * 32


def test_a_launch_whose_lock_was_taken_stops_without_touching_the_new_one(tmp_path: Path) -> None:
    """F14: token changed under a running process; its counter thread must not write into the new file either."""
    path = tmp_path / "train.lock"
    lock = RunLock.acquire(path, **FAST)
    os.rename(path, path.with_name("train.lock.stale"))
    new = foreign_lock(path)
    with pytest.raises(LockLost, match="belongs to another launch \\(host 0000000000000000\\)"):
        lock.check()
    time.sleep(0.2)
    assert read_lock(path) == new
    lock.release()
    assert read_lock(path) == new


def test_a_removed_lock_stops_the_launch(tmp_path: Path) -> None:
    path = tmp_path / "train.lock"
    lock = RunLock.acquire(path, **FAST)
    path.unlink()
    with pytest.raises(LockLost, match="is gone"):
        lock.check()
    lock.release()


def test_of_several_launches_that_find_a_dead_lock_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "train.lock"
    foreign_lock(path)
    results: list[Any] = []

    def contend() -> None:
        try:
            results.append(RunLock.acquire(path, attempt=1, beat_seconds=0.05, watch_seconds=0.4))
        except LockHeld as error:
            results.append(error)

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [result for result in results if isinstance(result, RunLock)]
    assert len(winners) == 1 and len(results) == 4
    winners[0].check()
    winners[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        RunLock.acquire(tmp_path / "file" / "train.lock", attempt=0)


def test_the_file_is_readable_json(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path / "train.lock", **FAST)
    assert json.loads((tmp_path / "train.lock").read_text())["attempt"] == 1
    lock.release()
