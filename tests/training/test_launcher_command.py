"""A launcher that started fewer processes than asked for is refused by its own command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from nexttransformer.training.launcher_command import launcher_problems

SETTINGS = Path(__file__).parents[2] / "launch/accelerate.yaml"
TRAINER = ["--module", "nexttransformer.train", "--config", "x.json"]


def found(*options: str, world_size: str = "6") -> list[str]:
    words = ["/opt/bin/python", "/opt/bin/accelerate", "launch", *options, *TRAINER]
    return launcher_problems(words, {"WORLD_SIZE": world_size})


def test_a_dropped_remainder_is_one_line() -> None:
    (line,) = found("--num_machines", "2", "--num_processes", "7")
    assert line.startswith("--num_processes 7 over --num_machines 2: Accelerate started only 6 processes.")
    assert found("--num-machines=2", "--num-processes=7") == [line]
    assert found("--num_machines", "2", "--num_processes", "7", world_size="7") == []


@pytest.mark.parametrize(("machines", "world_size", "is_refused"), [("2", "16", False), ("3", "15", True)])
def test_the_settings_file_counts_where_no_option_does(machines: str, world_size: str, is_refused: bool) -> None:
    lines = found("--config_file", str(SETTINGS), "--num_machines", machines, world_size=world_size)
    assert [line[:39] for line in lines] == (["--num_processes 16 over --num_machines 3"[:39]] if is_refused else [])


def test_other_launchers_are_left_alone() -> None:
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node=7", *TRAINER]
    assert launcher_problems(words, {"WORLD_SIZE": "6"}) == []
    assert launcher_problems(["python", "-m", "accelerate.commands.launch", "--num_processes", "7"], {}) == []


def test_the_parent_is_read_from_the_system() -> None:
    code = "from nexttransformer.training.launcher_command import parent_command; print(parent_command())"
    shell = f'"{sys.executable}" -c "{code}"; true'
    printed = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("['/bin/sh', '-c', ")
