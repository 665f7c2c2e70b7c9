"""The batch job's decision after an attempt: every row of the rules, and the count of attempts without progress."""

from pathlib import Path

import pytest

from nexttransformer import requeue
from nexttransformer.errors import ConfigError
from nexttransformer.requeue import EXIT_REQUEUE, JobRecord, begin, decide, end
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunState, Status


def before(attempt: int | None = 0, newest: str | None = "checkpoint_00000005", without: int = 0) -> JobRecord:
    return JobRecord(job="7", attempt=attempt, newest_checkpoint=newest, num_without_progress=without)


def state(status: Status, attempt: int = 1, newest: str | None = "checkpoint_00000010") -> RunState:
    return RunState(
        status=status,
        update=11,
        attempt=attempt,
        newest_checkpoint=newest,
        reason="why",
        num_attempts_without_progress=0,
    )


OLD = "checkpoint_00000005"
# (before, state, launchers' code, warned) -> (code, a part of the line)
CASES = [
    # Finished counts whatever the launchers' code; also when a finished run is submitted again.
    (before(), state("finished"), 1, True, 0, "finished at update 11"),
    (before(attempt=1), state("finished"), 0, False, 0, "finished at update 11"),
    (before(), state("stopped"), 1, True, EXIT_REQUEUE, "stopped and saved at update 11"),
    (before(), state("stopped"), 0, False, 0, "Submit the same command"),
    (before(), state("failed"), 0, True, 1, "failed at update 11: why"),
    (before(), state("running"), 137, False, EXIT_REQUEUE, "vanished"),
    (before(), state("running", newest=OLD), 137, False, 1, "vanished"),
    (before(), state("running", newest=OLD), 137, True, EXIT_REQUEUE, "vanished"),
    (before(None, None), state("running", attempt=0, newest=None), 137, False, 1, "newest complete checkpoint: none"),
    # The attempt wrote nothing: refused, or ended while it was starting.
    (before(None, None), None, 2, False, 2, "never began. Correct what is said above."),
    (before(None, None), None, 1, False, 1, "never began"),
    (before(None, None), None, 143, True, EXIT_REQUEUE, "never began"),
    (before(), state("stopped", attempt=0, newest=OLD), 1, False, 1, "never began"),
    (before(), state("running", attempt=0, newest=OLD), 1, True, EXIT_REQUEUE, "never began"),
    # Two attempts without a new checkpoint are borne, the third is the last.
    (before(without=1), state("stopped", newest=OLD), 0, True, EXIT_REQUEUE, "asked to queue"),
    (before(without=2), state("stopped", newest=OLD), 0, True, 1, "3 attempts in a row without a new checkpoint"),
    (before(without=2), state("stopped"), 0, True, EXIT_REQUEUE, "asked to queue"),
    (before(without=2), state("running", attempt=0, newest=OLD), 1, True, 1, "3 attempts in a row"),
]


@pytest.mark.parametrize(("old", "now", "exit_code", "was_warned", "code", "text"), CASES)
def test_decision(old: JobRecord, now: RunState | None, exit_code: int, was_warned: bool, code: int, text: str) -> None:
    decision = decide(old, now, exit_code=exit_code, was_warned=was_warned)
    assert decision.code == code
    assert text in decision.line and "\n" not in decision.line


def test_attempts_without_progress_are_counted_per_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")

    def attempt(job: str, number: int, newest: str | None) -> int:
        begin(folder, job)
        folder.write_state(state("stopped", number, newest))
        return end(folder, exit_code=0, was_warned=True).code

    assert [attempt("7", number, None) for number in range(3)] == [EXIT_REQUEUE, EXIT_REQUEUE, 1]
    # Submitted again by hand: a new job has its own three, and progress starts the count anew.
    assert [attempt("8", number, None) for number in (3, 4)] == [EXIT_REQUEUE] * 2
    assert attempt("8", 5, OLD) == EXIT_REQUEUE
    assert [attempt("8", number, OLD) for number in (6, 7, 8)] == [EXIT_REQUEUE, EXIT_REQUEUE, 1]


def test_command(prepared_site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    output = tmp_path / "run"
    config = Path(__file__).parents[2] / "configs/linear/gdn.json"
    words = ["--config", str(config), "--site-config", str(prepared_site), "--protocol", "test-v1"]
    words += [f"--output={output}", "--micro-batch", "2"]
    # The submitting shell may hold variables of a job; the batch shell is no process of one.
    monkeypatch.setenv("NNODES", "2")
    with pytest.raises(ConfigError, match="--micro-batch 0"):
        requeue.main(["--begin", "7", "--", *words[:-1], "0"])
    assert not output.exists()
    assert requeue.main(["--begin", "7", "--", *words]) == 0
    assert requeue.main(["--end", "2", "--", *words]) == 2
    assert capsys.readouterr().out == f"slurm: {output}: the attempt never began. Correct what is said above.\n"
    RunFolder(output).write_state(state("stopped", 0))
    assert requeue.main(["--end", "1", "--warned", "--", *words]) == EXIT_REQUEUE
    assert "asked to queue" in capsys.readouterr().out
