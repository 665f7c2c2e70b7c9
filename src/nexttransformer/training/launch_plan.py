"""What a launch may do with a run folder: start it, continue it, or be refused, naming every difference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexttransformer.errors import CheckpointError, join_problems
from nexttransformer.training.checkpoint_schema import TrainerState
from nexttransformer.training.events import EventKey, read_events
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunRecord

# What may lie in a folder that counts as empty: the lock, launcher output, a stop request.
_TRANSIENT = ("train.lock", "logs", "stop_requested")
_MAX_DIFFERENCES = 10


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch on a run folder may do.

    `record` is the folder's `run.json`, or the candidate where the folder is new. `attempt` counts
    from 0. `finished_line` is set when the run has ended: print it, write nothing, exit 0. Each
    warning is one line to print and log.
    """

    record: RunRecord
    is_new: bool
    attempt: int
    finished_line: str | None
    warnings: list[str]


def plan_launch(folder: RunFolder, candidate: RunRecord, resume: str) -> LaunchPlan:
    """Decides what this launch may do; reads only. Call it before and again under the lock.

    Args:
        folder: the output folder, present or not.
        candidate: the record this launch would write as attempt 0 (fresh run_id and time).
        resume: `auto`, `never` or the path of a checkpoint folder.

    `never` refuses a folder that holds anything. Whether a named checkpoint is complete is checked by
    `checkpoint_load.choose_checkpoint`. With a path from another folder and a new output folder the
    record takes over the checkpoint's run_id, so a moved run goes on as the same run.

    Raises:
        CheckpointError: naming every difference (mode, method, config key, protocol, data, seed,
            number of updates, and in formal runs code, with the changed files) between the launch
            and the folder. A smoke folder never becomes formal or open. Exit code 2.
    """
    root = folder.root
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"--output {root}: expected a folder, found a file. Use another --output.")
    try:
        present = {path.name for path in root.iterdir() if not _is_transient(path.name)} if root.exists() else set()
    except OSError as problem:
        raise CheckpointError(f"--output {root}: cannot be read: {problem.strerror}.") from None
    if resume == "never" and present:
        names = ", ".join(sorted(present)[:3])
        raise CheckpointError(
            f"--resume never: {root} is not empty ({names}). Use --resume auto to continue it, or another --output."
        )
    recorded = folder.read_record()
    if recorded is None:
        leftovers = sorted(name for name in present if name.startswith("checkpoint_") or name.endswith(".jsonl"))
        if leftovers:
            raise CheckpointError(
                f"{root} holds {leftovers[0]} but no run.json: not a whole run. Use another --output."
            )
        return LaunchPlan(_adopt_run_id(candidate, resume), True, 0, None, [])
    problems, warnings = compare_launch(recorded, candidate, str(folder.run_json))
    if problems:
        advice = (
            f"{root} cannot be continued by this launch. Repeat it with the recorded settings or use another --output."
        )
        raise CheckpointError(join_problems([*problems, advice]))
    log = read_events(folder.events)
    end = log.last(EventKey.RUN_END)
    finished = None
    if end is not None:
        finished = f"{root}: finished at update {end.update}; nothing to do."
    return LaunchPlan(recorded, False, log.next_attempt, finished, warnings)


def _is_transient(name: str) -> bool:
    return name in _TRANSIENT or name.startswith("train.lock.stale.")


def compare_launch(recorded: RunRecord, launch: RunRecord, where: str) -> tuple[list[str], list[str]]:
    """Returns (problems, warnings), one line each, of a launch on a folder that recorded a run."""
    problems = []
    if recorded.mode != launch.mode:
        problems.append(f"{where}: mode: this run is {recorded.mode} and stays so; the launch is {launch.mode}.")
    skipped = {"run_id", "created", "mode", "code", "config_digest"}
    old, new = recorded.model_dump(exclude=skipped), launch.model_dump(exclude=skipped)
    found = [f"{where}: {line}" for line in _differences(old, new, "")]
    problems.extend(found[:_MAX_DIFFERENCES])
    if len(found) > _MAX_DIFFERENCES:
        problems.append(f"{where}: and {len(found) - _MAX_DIFFERENCES} more differences.")
    code = _code_difference(recorded, launch, where)
    if code is None:
        return problems, []
    return ([*problems, code], []) if "formal" in (recorded.mode, launch.mode) else (problems, [code])


def _differences(old: Any, new: Any, place: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        missing = "(absent)"
        return [
            line
            for key in keys
            for line in _differences(old.get(key, missing), new.get(key, missing), f"{place}.{key}" if place else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for index, (a, b) in enumerate(zip(old, new, strict=True))
            for line in _differences(a, b, f"{place}[{index}]")
        ]
    return [] if old == new else [f"{place}: this run has {_short(old)}, the launch has {_short(new)}."]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _code_difference(recorded: RunRecord, launch: RunRecord, where: str) -> str | None:
    if recorded.code.source_digest == launch.code.source_digest:
        return None
    old, new = recorded.code.source_files, launch.code.source_files
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    more = f" and {len(changed) - _MAX_DIFFERENCES} more" if len(changed) > _MAX_DIFFERENCES else ""
    return f"{where}: code differs from the run's: {', '.join(changed[:_MAX_DIFFERENCES])}{more}."


def _adopt_run_id(candidate: RunRecord, resume: str) -> RunRecord:
    if resume in ("auto", "never"):
        return candidate
    state = TrainerState.read(Path(resume) / "trainer_state.json")
    return candidate.model_copy(update={"run_id": state.run_id})
