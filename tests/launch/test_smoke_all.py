"""launch/smoke_all.sh: every named method for two updates, a line each, and wrong arguments."""

from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, run

SCRIPT = LAUNCH / "smoke_all.sh"


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
    ],
)
def test_wrong_arguments(words: list[str], problem: str, prepared_site: Path, tmp_path: Path) -> None:
    result = run(SCRIPT, "--site-config", prepared_site, *words, cwd=tmp_path)
    assert result.returncode == 2 and problem in result.stderr and len(result.stderr.splitlines()) == 1
