"""One real finished `test-v1` run per test session: 2 gloo processes, a stop and a resume that repeats two updates."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.training.trainer_runs import arguments, train_rank

METHOD = "dense_full"
# A stop asked for in update 8, and a resume at the checkpoint of update 5: updates 6 to 8 are made twice.
STOP_UPDATE, RESUME_UPDATE = 7, 5


def freeze_package(files: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Makes this process believe that the package's files are these, whatever is edited meanwhile."""
    from nexttransformer import provenance

    real = provenance.package_files

    def package_files(package: Path = provenance.PACKAGE) -> dict[str, str]:
        return files if package == provenance.PACKAGE else real(package)

    patch.setattr(provenance, "package_files", package_files)


def run_rank(
    rank: int, world_size: int, words: list[str], faults: list[tuple[str, int, int, str]], files: dict[str, str]
) -> tuple[int, str]:
    """Runs one rank of one attempt."""
    freeze_package(files, pytest.MonkeyPatch())
    return train_rank(rank, world_size, words, faults)


def make_run(site: Path, folder: Path, files: dict[str, str]) -> Path:
    """Trains the run into `folder`; a second call, also of another worker of the session, finds it made.

    `<folder>.files.json` then holds the package's files as the run recorded them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            words = arguments(site, partial, "--eval", "bpb,core", micro_batch=4)
            stop = [("applied", STOP_UPDATE, 1, "SIGTERM")]
            assert run_ranks(run_rank, 2, words, stop, files, with_group=False) == [(0, ""), (0, "")]
            resume = ["--resume", str(partial / f"checkpoint_{RESUME_UPDATE:08d}")]
            outcome = run_ranks(run_rank, 2, [*words, *resume], [], files, with_group=False, limit_seconds=200)
            assert outcome == [(0, ""), (0, "")]
            folder.with_suffix(".files.json").write_text(json.dumps(files))
            partial.rename(folder)
    return folder
