"""launch/train.sh and the launcher behind it, with a stand-in for the trainer."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nexttransformer import launch
from nexttransformer.errors import ConfigError
from tests.launch.scripts import LAUNCH, environment, run

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunState

mode, output, rank = sys.argv[1], Path(sys.argv[3]), os.environ["RANK"]
if mode == "refuse":
    sys.exit(2)
if mode == "kill":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if mode == "stop":
    def save(number, frame):
        (output / f"rank{rank}").write_text(signal.Signals(number).name)
        if rank == "0":
            RunFolder(output).write_state(RunState(status="stopped", update=1, attempt=0, newest_checkpoint=None,
                                                   reason="signal", num_attempts_without_progress=0))
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
    (output / f"ready{rank}").touch()
    time.sleep(60)
if mode == "interrupt":
    def count(number, frame):
        if (output / "first").exists():
            os._exit(130)
        (output / "first").touch()
    signal.signal(signal.SIGINT, count)
    (output / "ready0").write_text(str(os.getpid()))
    while True:
        time.sleep(60)
"""


def start(mode: str, folder: Path, processes: int) -> "subprocess.Popen[str]":
    (folder / "stand_in_trainer.py").write_text(TRAINER)
    code = (
        "import sys; from nexttransformer.launch import launch; "
        f"sys.exit(launch('stand_in_trainer', ['{mode}', '--output', '{folder}'], {processes}))"
    )
    base = environment()
    base["PYTHONPATH"] += f":{folder}"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=base)


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.1)


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "code", "line"), [("refuse", 2, "exit code 2"), ("kill", 137, "ended by SIGKILL")])
def test_exit_code_is_that_of_the_rank_that_failed(mode: str, code: int, line: str, tmp_path: Path) -> None:
    launcher = start(mode, tmp_path, 2)
    _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == code
    last = errors.splitlines()[-1]
    assert last.startswith("launch: rank ") and last.endswith(f"{line}.")
    assert "Traceback" not in errors
    if mode == "kill":
        assert "rank 1 of 2" in last


@pytest.mark.dist
def test_a_signal_reaches_every_rank_and_a_saved_stop_is_success(tmp_path: Path) -> None:
    launcher = start("stop", tmp_path, 2)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    # SIGUSR1 is the one that plain torchrun does not handle.
    launcher.send_signal(signal.SIGUSR1)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert [(tmp_path / name).read_text() for name in ("rank0", "rank1")] == ["SIGUSR1", "SIGUSR1"]


@pytest.mark.dist
def test_a_second_interrupt_ends_the_trainer_at_once(tmp_path: Path) -> None:
    launcher = start("interrupt", tmp_path, 1)
    wait_for(tmp_path / "ready0")
    launcher.send_signal(signal.SIGINT)
    wait_for(tmp_path / "first")
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1] == "launch: ended by SIGINT before the run was saved."
    assert not Path(f"/proc/{(tmp_path / 'ready0').read_text()}").exists()


def test_number_of_processes() -> None:
    assert launch.num_processes({}, 8) == 8
    assert launch.num_processes({}, 0) == 1
    assert launch.num_processes({"NPROC_PER_NODE": "3"}, 8) == 3
    assert launch.num_processes({"NPROC_PER_NODE": "2"}, 0) == 2
    assert launch.num_processes({"GPUS_PER_NODE": "4"}, 8) == 4
    with pytest.raises(ConfigError, match="NPROC_PER_NODE=9: only 8 GPUs are visible"):
        launch.num_processes({"NPROC_PER_NODE": "9"}, 8)


def test_script_refuses_what_is_not_one_machine(tmp_path: Path) -> None:
    (tmp_path / "site.local.json").write_text('{"data_root": "data"}')
    result = run(LAUNCH / "train.sh", "--config", "x.json", cwd=tmp_path, NNODES="2", MASTER_PORT="7")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("MASTER_PORT=7: expected a port")
    assert "Use: accelerate launch --config_file launch/accelerate.yaml" in lines[1]


def test_script_refuses_a_bad_site_file_by_itself(tmp_path: Path) -> None:
    for arguments in (["--site-config", "none.json"], ["--site-config=none.json"], []):
        result = run(LAUNCH / "train.sh", "--config", "x.json", *arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1 and "site file" in result.stderr


def test_script_names_every_mistake_once_before_it_starts_processes(tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text('{"data_rot": "data"}')
    mistakes = ["--config", "none.json", "--site-config", "site.json", "--micro-batch", "0", "--smoke-step", "2"]
    result = run(sys.executable, "-m", "nexttransformer.launch", *mistakes, cwd=tmp_path, NPROC_PER_NODE="2")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    expected = ["--smoke-step.", "--output is missing", "--micro-batch 0", "'data_root'", "'data_rot'", "none.json"]
    assert [sum(text in line for line in lines) for text in expected] == [1, 1, 1, 2, 1, 1], result.stderr
