import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexttransformer.training.stop import SIGNALS, StopRequests


@pytest.fixture
def requests(tmp_path: Path) -> Iterator[StopRequests]:
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = StopRequests(tmp_path / "stop_requested", None)
    stop.install()
    yield stop
    stop.restore()
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_only_sets_a_flag(requests: StopRequests, number: signal.Signals) -> None:
    assert requests.poll() is None
    os.kill(os.getpid(), number)
    assert requests.poll() == number.name
    assert requests.poll() == number.name


def test_the_first_source_counts(requests: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.poll() == "SIGUSR1"


def test_the_stop_file_is_seen_and_cleared(tmp_path: Path, requests: StopRequests) -> None:
    (tmp_path / "stop_requested").touch()
    assert requests.poll() == "stop_file"
    requests.clear_stop_file()
    requests.clear_stop_file()
    assert not (tmp_path / "stop_requested").exists()
    assert StopRequests(tmp_path / "stop_requested", None).poll() is None


def test_the_time_limit_counts_from_the_start() -> None:
    limited = StopRequests(None, 0.05 / 60)
    assert limited.poll() is None
    time.sleep(0.06)
    assert limited.poll() == "time_limit"
    assert StopRequests(None, 60.0).poll() is None
    assert StopRequests(None, None).poll() is None


_BUSY = """
import time
from nexttransformer.training.stop import StopRequests
stop = StopRequests(None, None)
stop.install()
print("ready", flush=True)
while stop.poll() is None:
    time.sleep(0.01)
print(stop.poll(), flush=True)
time.sleep(100)
"""


def test_a_second_sigint_ends_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT
