"""Folders of compiled code: one per job and local rank, on a local disk, begun with a copy of the last complete one."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nexttransformer.training import compile_cache
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.compile_cache import file_system, mark_warm, set_cache_folders
from nexttransformer.training.distributed import World

GPU = World(9, 16, 1, 1, 2, torch.device("cuda", 1), "host", SingleProcess())
MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/nvme0 /home/me/local\\040disk xfs rw 0 0
tmpfs /scratch tmpfs rw 0 0
weka /scratch wekafs rw 0 0
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_held", {})
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "SLURM_JOB_ID"):
        # Set first, so that what the code under test sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(root: Path, job: str, world: World = GPU) -> tuple[Path, list[str]]:
    """Begins a job as the trainer does; returns its inductor folder and the warnings."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.pop(name, None)
    os.environ["SLURM_JOB_ID"] = job
    warnings = set_cache_folders(root, world)
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), warnings


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/opt/cache", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/home/me/local disk/cache", "xfs"),
        ("/homeless", "ext4"),
        ("/scratch/me", "wekafs"),
    ],
)
def test_file_system(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_one_folder_per_job_and_local_rank(tmp_path: Path) -> None:
    assert start(tmp_path, "7") == (tmp_path / "inductor/7/rank_1", [])
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton/7/rank_1")
    assert start(tmp_path, "7", replace(GPU, local_rank=0))[0] == tmp_path / "inductor/7/rank_0"


def test_nothing_is_made_on_a_cpu(tmp_path: Path) -> None:
    start(tmp_path, "7", replace(GPU, device=torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys
from pathlib import Path
from nexttransformer.training import compile_cache
print(compile_cache._claim(Path(sys.argv[1]), "local", "rank_0"), flush=True)
sys.stdin.read()
"""


def test_runs_started_by_hand_at_the_same_time_do_not_share(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        folders = {each.stdout.readline().strip() for each in (first, second) if each.stdout}
        assert folders == {str(tmp_path / "local/rank_0"), str(tmp_path / "local-2/rank_0")}
        first.kill()
        second.kill()
    # A hold ends with its process, whatever ended it.
    assert compile_cache._claim(tmp_path, "local", "rank_0") == tmp_path / "local/rank_0"
    assert compile_cache._claim(tmp_path, "local", "rank_0") == tmp_path / "local/rank_0"


def test_a_new_job_begins_with_a_copy_of_the_newest_complete_one(tmp_path: Path) -> None:
    for job, content in (("5", "old"), ("6", "new"), ("7", "incomplete")):
        folder, _ = start(tmp_path, job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel").write_text(content)
        if job != "7":
            mark_warm()
            age = time.time() - (100 if job == "5" else 50)
            os.utime(folder / ".warm", (age, age))
    folder, warnings = start(tmp_path, "8")
    assert not warnings and (folder / "kernel").read_text() == "new"
    # A copy, not complete by itself; the same job started again keeps what it has.
    assert [path.name for path in folder.iterdir()] == ["kernel"]
    (folder / "kernel").write_text("own")
    assert (tmp_path / "inductor/6/rank_1/kernel").read_text() == "new"
    assert (start(tmp_path, "8")[0] / "kernel").read_text() == "own"


def test_folders_of_old_jobs_are_removed(tmp_path: Path) -> None:
    old, recent, local = (tmp_path / "inductor" / name for name in ("3", "4", "local"))
    for folder in (old, recent, local):
        folder.mkdir(parents=True)
    month = time.time() - 31 * 24 * 3600
    for folder in (old, local):
        os.utime(folder, (month, month))
    start(tmp_path, "5")
    assert not old.exists() and recent.exists() and local.exists()


@pytest.mark.parametrize("obstacle", ["inductor", "inductor/7/.rank_1.lock/folder"])
def test_a_folder_that_cannot_be_used_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    monkeypatch.setattr(compile_cache.tempfile, "gettempdir", lambda: str(tmp_path / "local"))
    (tmp_path / "shared" / obstacle).parent.mkdir(parents=True)
    (tmp_path / "shared" / obstacle).write_text("")
    folder, warnings = start(tmp_path / "shared", "7")
    assert folder == tmp_path / f"local/nexttransformer_{os.getuid()}/inductor/7/rank_1"
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path}/shared/inductor cannot be used (") and "goes to" in warning


def test_a_copy_that_fails_or_was_cut_off(tmp_path: Path) -> None:
    old, own = start(tmp_path, "6")[0], tmp_path / "inductor/7/rank_1"
    old.mkdir()
    (old / "kernel").write_text("code")
    mark_warm()
    # Vanishes while it is copied, as a file of a job that still compiles.
    (old / "gone").symlink_to("nowhere")
    assert start(tmp_path, "7")[1] == [
        f"{own}: starts empty, compiling takes longer: the last job's could not be copied."
    ]
    assert not own.exists()
    (old / "gone").unlink()
    assert start(tmp_path, "7")[1] == [] and [path.name for path in own.iterdir()] == ["kernel"]


def test_a_network_file_system_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "file_system", lambda path: "lustre")
    monkeypatch.setattr(compile_cache.tempfile, "gettempdir", lambda: str(tmp_path / "local"))
    folder, warnings = start(tmp_path / "shared", "7")
    assert folder == tmp_path / f"local/nexttransformer_{os.getuid()}/inductor/7/rank_1"
    assert len(warnings) == 2 and "is on a network file system (lustre)" in warnings[0]
