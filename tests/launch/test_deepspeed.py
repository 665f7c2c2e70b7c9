"""launch/deepspeed.sh with a stand-in for DeepSpeed's launcher: nothing of DeepSpeed is needed or installed."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, ROOT, run

STAND_IN = """#!{python}
import json, os, sys
variables = dict(line.rstrip("\\n").split("=", 1) for line in open(os.environ["DS_ENV_FILE"]))
print(json.dumps([sys.argv[1:], variables, os.environ["DS_ENV_FILE"]]))
sys.exit(7)
"""


def start(tmp_path: Path, site: Path, *launcher: str, hosts: str = "node1 slots=8\nnode2 slots=8\n", **extra: str):
    """Runs the script in a folder with a hostfile; `launcher` are options before the trainer's."""
    (tmp_path / "hosts.txt").write_text(hosts)
    words = ["--config", ROOT / "configs/linear/gdn.json", "--site-config", site, "--output", tmp_path / "run"]
    trainer = [*words, "--micro-batch", "16", "--formal"]
    return run(LAUNCH / "deepspeed.sh", *launcher, *trainer, cwd=tmp_path, **extra), [str(word) for word in trainer]


def test_the_launcher_gets_the_trainer_and_the_nodes_get_the_variables(prepared_site: Path, tmp_path: Path) -> None:
    stand_in = tmp_path / "bin/deepspeed"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    launcher = ["--hostfile", "hosts.txt", "--include", "node1@node2", "--master_port", "29501"]
    result, trainer = start(
        tmp_path, prepared_site, *launcher, PATH=path, NCCL_SOCKET_IFNAME="eth0", CUDA_HOME="/opt/cuda"
    )
    # The launcher's exit code is passed on.
    assert result.returncode == 7, result.stderr
    words, variables, file = json.loads(result.stdout)
    assert words == [
        *launcher,
        *("--ssh_port", "22", "--no_local_rank", "--module", "nexttransformer.train"),
        *trainer,
    ]
    assert variables["FLA_DISABLE_BACKEND_DISPATCH"] == "1" and variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert variables["NEXTTRANSFORMER_SITE_CONFIG"] == str(prepared_site)
    assert "CUDA_HOME" not in variables and "PATH" not in variables
    assert not Path(file).exists()


def test_without_deepspeed_it_says_so(prepared_site: Path, tmp_path: Path) -> None:
    result, _ = start(tmp_path, prepared_site, "--hostfile", "hosts.txt")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "deepspeed: DeepSpeed is not installed here. Run: uv pip install deepspeed, or use launch/slurm.sbatch or "
        "launch/node.sh."
    ]


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("node1 slots=8\nnode2\n", 'line 2: expected NAME slots=GPUS, got "node2".'),
        ("node1 slots=8\n# two\nnode2 slots=4\n", "line 3: node2 has 4 slots, the others 8. Give all the same."),
        ("node1 slots=8\nnode1 slots=8\n", "line 2: node1 is listed twice."),
        ("# nothing\n", "no host in it."),
        ("", "no host in it."),
    ],
)
def test_a_bad_hostfile_is_one_line(hosts: str, problem: str, prepared_site: Path, tmp_path: Path) -> None:
    result, _ = start(tmp_path, prepared_site, "--hostfile", "hosts.txt", hosts=hosts)
    assert (result.returncode, result.stderr) == (2, f"deepspeed: hosts.txt: {problem}\n")


def test_the_hostfile_is_needed_and_stands_first(prepared_site: Path, tmp_path: Path) -> None:
    result, _ = start(tmp_path, prepared_site)
    assert result.returncode == 2 and result.stderr.startswith("deepspeed: --hostfile is missing.")
    result, _ = start(tmp_path, prepared_site, "--hostfile", "none.txt")
    assert (result.returncode, result.stderr) == (2, "deepspeed: --hostfile none.txt: no such file.\n")
