"""launch/smoke_all.sh: every named method for two updates, a line each, Ctrl-C, and wrong arguments."""

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, environment, run

SCRIPT = LAUNCH / "smoke_all.sh"
LINE_START = "launch/smoke_all.sh: --output runs: "


def test_a_line_of_figures_for_each_method_and_repeating_continues(prepared_site: Path, tmp_path: Path) -> None:
    words = [SCRIPT, "--site-config", prepared_site, "--output", "runs", "--protocol", "test-v1", "dense_full"]
    result = run(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    done, figures, written = result.stdout.splitlines()
    assert done == "dense_full: done" and written == "Written: runs/report.html"
    assert figures.startswith("dense_full: finished, update 2 of 2, loss ") and " tokens/s, " in figures
    metrics = (tmp_path / "runs/dense_full/metrics.jsonl").read_bytes()
    # A method that cannot run fails the whole, and what is finished is not trained again.
    (tmp_path / "runs/gdn").mkdir()
    (tmp_path / "runs/gdn/run.json").write_text("{}")
    again = run(*words, "gdn", cwd=tmp_path)
    assert again.returncode == 1 and "gdn: exit code 2: " in again.stdout
    assert (tmp_path / "runs/dense_full/metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--output", "runs", "densefull"], "no method 'densefull': expected some of fox "),
        (["dense_full"], "--output DIR is missing"),
        (["--output"], "--output needs a value."),
        (["--output", "runs", "--rows", "3"], "unknown option '--rows'"),
        (["--output", "runs", "--micro-batch", "0"], "--micro-batch 0: expected a whole number"),
        (["--output", "runs", "--protocol", "formal"], "--protocol formal: unknown protocol. Did you mean"),
    ],
)
def test_wrong_arguments(words: list[str], problem: str, prepared_site: Path, tmp_path: Path) -> None:
    result = run(SCRIPT, "--site-config", prepared_site, *words, cwd=tmp_path)
    assert result.returncode == 2 and problem in result.stderr and len(result.stderr.splitlines()) == 1


def test_an_output_that_cannot_be_used(prepared_site: Path, tmp_path: Path) -> None:
    words = [SCRIPT, "--site-config", prepared_site, "--output", "runs", "--protocol", "test-v1", "dense_full"]
    (tmp_path / "runs").write_text("")
    result = run(*words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"{LINE_START}cannot be made or written to.\n")
    (tmp_path / "runs").unlink()
    # Two at the same time would overwrite each other's logs.
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run(*words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"{LINE_START}another launch/smoke_all.sh is running there.\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".lock"]


def test_ctrl_c_waits_for_the_run_and_starts_no_other(prepared_site: Path, tmp_path: Path) -> None:
    words = [SCRIPT, "--site-config", prepared_site, "--output", "runs", "--protocol", "test-v1", "dense_full", "sssl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A process group of its own, as a terminal gives it, and Ctrl-C not ignored, as it is for what runs in the
    # background: a shell cannot change that.
    pipes |= {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), **pipes) as script:
        while script.poll() is None and not (tmp_path / "runs/dense_full.log").exists():
            time.sleep(0.05)
        os.killpg(script.pid, signal.SIGINT)
        output, _ = script.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.killpg(script.pid, 0)
    assert script.returncode == 1 and output.startswith("dense_full: exit code ") and "sssl" not in output
    assert len(output.splitlines()) == 1
