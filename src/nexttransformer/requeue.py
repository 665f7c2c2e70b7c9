"""What a batch job does when its launchers have ended: finished, failed, stopped, or queued again.

The launchers' exit codes are masked by signals, so the decision is made from `run_state.json`, as it was
before the attempt and as it is after it. `launch/slurm.sbatch` calls `--begin` and `--end`.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nexttransformer import jsonio
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, NextTransformerError, run_command
from nexttransformer.launch_environment import option_value
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunState
from nexttransformer.training.strict_record import Count, StrictRecord

# A job that makes no checkpoint in so many attempts in a row is not queued again.
MAX_ATTEMPTS_WITHOUT_PROGRESS = 3
# Exit code of `--end` that asks the batch file to queue the job again (EX_TEMPFAIL).
EXIT_REQUEUE = 75


class JobRecord(StrictRecord):
    """`logs/requeue.json`: where the run stood when this job's current attempt began."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.requeue/1"

    job: str
    attempt: int | None
    newest_checkpoint: str | None
    num_without_progress: Count


@dataclass(frozen=True)
class Decision:
    """Exit code of the job, or `EXIT_REQUEUE`, and the line that says why."""

    code: int
    line: str


def decide(before: JobRecord, state: RunState | None, *, exit_code: int, was_warned: bool) -> Decision:
    """Decides what the job does after an attempt. Pure.

    Args:
        before: written by `--begin`; `num_without_progress` counts earlier attempts of this job.
        state: the run state now, None if there is none.
        exit_code: of the launchers; only tells whether an attempt that never began was refused.
        was_warned: the job itself asked the run to stop (SIGUSR1: time limit or preemption).
    """
    if state is not None and state.status == "finished":
        return Decision(EXIT_OK, f"finished at update {state.update} ({state.newest_checkpoint}).")
    has_progress = False
    advice = "Submit the same command to continue."
    if state is None or state.attempt == before.attempt:
        what = "the attempt never began"
        can_requeue, code = was_warned, EXIT_USAGE if exit_code == EXIT_USAGE else EXIT_FAILED
        advice = "Correct what is said above."
    else:
        has_progress = state.newest_checkpoint not in (None, before.newest_checkpoint)
        newest = f"newest complete checkpoint: {state.newest_checkpoint or 'none'}"
        if state.status == "failed":
            return Decision(EXIT_FAILED, f"failed at update {state.update}: {state.reason}; {newest}. {advice}")
        if state.status == "stopped":
            what = f"stopped and saved at update {state.update} ({state.newest_checkpoint})"
            can_requeue, code = was_warned, EXIT_OK
        else:
            what = f"the processes vanished after update {state.update}; {newest}"
            can_requeue, code = was_warned or has_progress, EXIT_FAILED
    if not can_requeue:
        return Decision(code, f"{what}. {advice}")
    attempts = 0 if has_progress else before.num_without_progress + 1
    if attempts >= MAX_ATTEMPTS_WITHOUT_PROGRESS:
        return Decision(
            EXIT_FAILED,
            f"{what}. Not queued again: {attempts} attempts in a row without a new checkpoint. "
            "Give the job more time (--time) or an earlier warning (--signal).",
        )
    return Decision(EXIT_REQUEUE, f"{what}. Slurm is asked to queue the job again.")


def begin(folder: RunFolder, job: str) -> JobRecord:
    """Notes where the run stands before an attempt of a job; a new job starts a new count."""
    state = folder.read_state()
    earlier = _read(folder)
    without = 0
    newest = state.newest_checkpoint if state else None
    if earlier is not None and earlier.job == job and earlier.newest_checkpoint == newest:
        without = earlier.num_without_progress
    record = JobRecord(
        job=job, attempt=state.attempt if state else None, newest_checkpoint=newest, num_without_progress=without
    )
    _write(folder, record)
    return record


def end(folder: RunFolder, *, exit_code: int, was_warned: bool) -> Decision:
    """Decides after an attempt and keeps the count of attempts without progress for the next one."""
    before = _read(folder) or JobRecord(job="", attempt=None, newest_checkpoint=None, num_without_progress=0)
    state = folder.read_state()
    decision = decide(before, state, exit_code=exit_code, was_warned=was_warned)
    newest = state.newest_checkpoint if state else None
    without = before.num_without_progress + 1 if newest == before.newest_checkpoint else 0
    _write(folder, before.model_copy(update={"newest_checkpoint": newest, "num_without_progress": without}))
    return decision


def _path(folder: RunFolder) -> Path:
    return folder.logs / "requeue.json"


def _read(folder: RunFolder) -> JobRecord | None:
    try:
        return JobRecord.read(_path(folder))
    except NextTransformerError:
        # Absent, or torn by a dying node: the count starts anew.
        return None


def _write(folder: RunFolder, record: JobRecord) -> None:
    folder.logs.mkdir(parents=True, exist_ok=True)
    jsonio.write_json_atomic(_path(folder), record.to_json())


def _without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The batch shell is no process of the job: its options are checked without the launchers' variables."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE")
    return {name: value for name, value in environ.items() if name not in names}


def main(argv: list[str] | None = None) -> int:
    """Usage: python -m nexttransformer.requeue {--begin JOB | --end CODE [--warned]} -- TRAINER ARGUMENTS."""
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m nexttransformer.requeue", description=main.__doc__)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--begin", metavar="JOB", help="check the trainer's arguments, note where the run stands")
    kind.add_argument("--end", metavar="CODE", type=int, help="decide after the launchers ended with this code")
    parser.add_argument("--warned", action="store_true", help="the job had asked the run to stop")
    given, arguments = parser.parse_args(words[:split]), words[split + 1 :]
    if given.begin is not None:
        # Imported here, as it imports torch.
        from nexttransformer.training.options import parse_options

        options = parse_options(arguments, _without_job_variables(os.environ))
        begin(RunFolder(options.output), given.begin)
        return EXIT_OK
    output = option_value(arguments, "--output")
    assert output is not None, "--begin has checked it"
    decision = end(RunFolder(Path(output)), exit_code=given.end, was_warned=given.warned)
    print(f"slurm: {output}: {decision.line}", flush=True)
    return decision.code


if __name__ == "__main__":
    run_command(main)
