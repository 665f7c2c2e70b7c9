"""Choosing where a launch starts: the newest complete checkpoint of the run, or the named one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import CheckpointError, join_problems
from nexttransformer.training import checkpoint_files as files
from nexttransformer.training.checkpoint_schema import CheckpointDigests, CompleteMarker, TrainerState
from nexttransformer.training.collectives import Collectives, on_rank0
from nexttransformer.training.run_schema import RunRecord


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over.

    `message` is the line to print; `reason` an id for `checkpoint_skipped`: `incomplete`, `damaged`,
    `other_run`, `superseded`; `file` what is wrong in the folder.
    """

    path: Path
    reason: str
    file: str | None
    message: str


@dataclass(frozen=True)
class Choice:
    """Where a launch starts: `path`, `marker`, `state` are None for update 0. `message` says it loudly."""

    path: Path | None
    marker: CompleteMarker | None
    state: TrainerState | None
    skipped: list[Skipped]
    message: str

    @property
    def update(self) -> int:
        """Updates already completed."""
        return 0 if self.state is None else self.state.update


def choose_checkpoint(
    root: Path,
    run: RunRecord,
    resume: str,
    collectives: Collectives,
    check_lock: Callable[[], None] = lambda: None,
) -> Choice:
    """Picks the newest complete checkpoint of this run, or the named one; collective, same result on all ranks.

    Rank 0 also tidies the folder, under the lock: leftover `.partial` folders are removed, a folder that
    has a marker but fails it or is another run's is renamed to `rejected_checkpoint_%08d`, and when `resume`
    is a path, newer checkpoints of this folder are renamed alike (they are superseded).

    Args:
        root: the run folder.
        run: its `run.json`.
        resume: `auto`, `never` or a path.
        collectives: over a CPU group.
        check_lock: as in `save_checkpoint`.

    Raises:
        CheckpointError: a named checkpoint is incomplete, damaged or of another run; or a checkpoint of
            this run differs from it in mode, method, config, protocol, data or seed (never skipped silently).
    """

    def start() -> list[tuple[int, Path]]:
        check_lock()
        files.remove_partials(root)
        return files.list_checkpoints(root)

    listed = on_rank0(start, collectives)
    if resume not in ("auto", "never"):
        return _named(root, Path(resume), run, listed, collectives)
    passed_over: list[tuple[Path, str, str, str]] = []
    for update, path in listed:
        try:
            marker = files.verify_checkpoint(path, collectives)
            state = on_rank0(
                lambda path=path, marker=marker, update=update: _judge(path, marker, run, update), collectives
            )
        except files.UnusableCheckpoint as problem:
            reason = problem.reason
            passed_over.append((path, reason, problem.file, str(problem)))
            on_rank0(lambda path=path: _tidy(path), collectives)
            continue
        skipped = _skipped(passed_over, f"resuming from {path.name}.")
        return Choice(path, marker, state, skipped, f"Resuming from {path} (update {update}).")
    skipped = _skipped(passed_over, "no older complete checkpoint.")
    again = (
        " No complete checkpoint was found, so all updates are repeated." if (root / "events.jsonl").exists() else ""
    )
    return Choice(None, None, None, skipped, f"Starting at update 0 in {root}.{again}")


def _named(root: Path, path: Path, run: RunRecord, listed: list[tuple[int, Path]], collectives: Collectives) -> Choice:
    try:
        marker = files.verify_checkpoint(path, collectives)
        state = on_rank0(lambda: _judge(path, marker, run, files.update_of(path)), collectives)
    except files.UnusableCheckpoint as problem:
        raise CheckpointError(
            f"--resume {path}: {problem} Use --resume auto to take the newest complete one."
        ) from None

    def supersede() -> list[Skipped]:
        result = []
        for update, newer in listed:
            if update > marker.update:
                files.put_aside(newer)
                text = f"{newer} is newer than the named checkpoint; put aside as rejected_{newer.name}."
                result.append(Skipped(newer, "superseded", None, text))
        return result

    return Choice(
        path, marker, state, on_rank0(supersede, collectives), f"Resuming from {path} (update {state.update})."
    )


def _skipped(passed_over: list[tuple[Path, str, str, str]], what_now: str) -> list[Skipped]:
    return [
        Skipped(path, reason, file or None, f"{message} Skipped; {what_now}")
        for path, reason, file, message in passed_over
    ]


def _tidy(path: Path) -> None:
    if (path / files.MARKER_FILE).exists():
        files.put_aside(path)


def _judge(path: Path, marker: CompleteMarker, run: RunRecord, update: int | None) -> TrainerState:
    """Compares a verified checkpoint with the run; `update` is what the folder's name says (None: nothing)."""
    state = read_state(path, marker)
    if update is not None and marker.update != update:
        raise files.damaged(path, files.MARKER_FILE, f"is of update {marker.update}")
    if marker.run_id != run.run_id:
        raise files.ForeignCheckpoint(
            f"{path} belongs to another run ({files.MARKER_FILE}: run_id {marker.run_id}, this run is {run.run_id}).",
            files.MARKER_FILE,
        )
    expected = {"mode": run.mode, "method": run.method, "seed": run.seed, "num_updates": run.num_updates}
    problems = [
        f"{path}: {key}: the checkpoint has {getattr(state, key)!r}, the run has {value!r}."
        for key, value in expected.items()
        if getattr(state, key) != value
    ]
    digests = CheckpointDigests.of_run(run)
    problems += [
        f"{path}: {key} digest: the checkpoint has {getattr(state.digests, key)}, the run has {getattr(digests, key)}."
        for key in CheckpointDigests.model_fields
        # Code was judged when the launch was planned: open runs may go on with other code.
        if key != "source" and getattr(state.digests, key) != getattr(digests, key)
    ]
    if problems:
        raise CheckpointError(join_problems(problems))
    return state


def read_state(path: Path, marker: CompleteMarker) -> TrainerState:
    """Reads the trainer state and compares what the marker repeats of it.

    Raises:
        CheckpointError: the two contradict each other.
    """
    state = TrainerState.read(path / files.STATE_FILE)
    for key in ("run_id", "mode", "method", "update", "tokens_seen", "data_chain"):
        if getattr(state, key) != getattr(marker, key):
            raise files.damaged(path, files.STATE_FILE, f"{key} contradicts {files.MARKER_FILE}")
    return state
