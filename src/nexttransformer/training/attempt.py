"""One attempt of a run: connect, check, train, finish; every rank leaves through the same path.

The last line of an attempt says: finished, stopped and saved, or failed, with the newest complete
checkpoint. Launchers may mask the exit code, so `run_state.json` says the same.
"""

import gc
import sys
import traceback

from nexttransformer.errors import EXIT_FAILED, EXIT_OK, NextTransformerError
from nexttransformer.training.checkpoint_files import read_marker
from nexttransformer.training.collectives import on_rank0
from nexttransformer.training.distributed import Limits, connect, disconnect
from nexttransformer.training.events import EventKey
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.session import Hook, Session, no_hook, open_session
from nexttransformer.training.stop import StopRequests
from nexttransformer.training.trainer import Outcome, Progress, progress_at_start, train
from nexttransformer.training.watchdog import Watchdog, is_connection_error


def run_training(options: TrainOptions, *, limits: Limits | None = None, hook: Hook = no_hook) -> int:
    """Runs one attempt and returns its exit code: 0 finished or stopped and saved, 1 failed.

    Args:
        options: a checked launch.
        limits: time limits, other than the usual ones only in tests.
        hook: called at named points of the attempt, in tests.

    Raises:
        NextTransformerError: refused before update 1, the same on every rank (exit code 2).
    """
    folder = RunFolder(options.output)
    world = connect(options.place, limits or Limits(), folder.logs)
    is_clean = False
    try:
        opened = open_session(options, world, hook)
        if isinstance(opened, str):
            if world.is_main:
                print(opened, flush=True)
            is_clean = True
            return EXIT_OK
        code = _run_attempt(opened)
        is_clean = True
        return code
    except NextTransformerError:
        # Every rank raises it, so that leaving together is possible.
        is_clean = True
        raise
    finally:
        disconnect(world, is_clean=is_clean)


def _run_attempt(session: Session) -> int:
    """Trains, finishes and closes; every rank leaves through here with the same outcome."""
    world, journal = session.world, session.journal
    stops = StopRequests(
        session.folder.stop_file if world.is_main else None, session.options.stop_minutes if world.is_main else None
    )
    watchdog = Watchdog(world, session.folder.logs, on_failure=lambda problem: _note_lost_rank(session, problem))
    state = progress_at_start(session)
    stops.install()
    stops.clear_stop_file()
    watchdog.start()
    try:
        outcome = train(session, state, stops, watchdog)
        if outcome == "finished":
            _finish(session, state)
        return _last_line(session, outcome, state.update)
    except NextTransformerError as error:
        # Agreed on by all ranks.
        reason = type(error).__name__
        if session.is_folder_ours():
            journal.event(EventKey.ATTEMPT_END, "failed", {"reason": reason}, update=state.update)
            journal.state("failed", state.update, reason)
        newest = journal.newest_checkpoint or "none"
        session.progress.pause()
        if world.is_main:
            print(f"failed: {error} Newest complete checkpoint: {newest}.", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except Exception as error:
        # This rank alone: the watchdogs tell the others, name the rank and end all processes.
        if is_connection_error(error):
            text = "lost the connection to another rank; waiting to hear which"
            print(
                f"rank {world.rank} on {world.host} {text}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True
            )
        else:
            traceback.print_exc()
        watchdog.explain(error)
        _note_lost_rank(session, f"rank {world.rank}: {type(error).__name__}")
        raise
    finally:
        watchdog.stop()
        stops.restore()
        gc.unfreeze()
        gc.enable()
        session.close()


def _finish(session: Session, state: Progress) -> None:
    """Frees the training model and scores the final checkpoint as anybody could: loaded fresh from disk."""
    session.model = session.optimizer = None
    if session.evaluations.has_final:
        marker = on_rank0(lambda: read_marker(session.folder.checkpoint(state.update)), session.world.control)
        session.evaluations.final(session.journal, marker)


def _last_line(session: Session, outcome: Outcome, update: int) -> int:
    """Writes the end of the attempt and prints the one line people look for."""
    journal, progress = session.journal, session.progress
    newest = journal.newest_checkpoint
    if outcome == "stopped":
        journal.event(EventKey.ATTEMPT_END, "stopped", {"reason": "stop_requested"}, update=update)
        journal.state("stopped", update, "stop_requested")
        progress.say(f"stopped and saved at update {update} ({newest}). Repeat the command to continue.")
        return EXIT_OK
    journal.event(EventKey.ATTEMPT_END, "finished", {"reason": "last_update"}, update=update)
    marker = on_rank0(lambda: read_marker(session.folder.checkpoint(update)), session.world.control)
    meta = {"checkpoint": session.folder.checkpoint(update).name, "complete_digest": marker.complete_digest}
    journal.event(EventKey.RUN_END, "finished", meta, update=update)
    journal.state("finished", update, "last_update")
    progress.say(f"finished at update {update} ({newest}).")
    return EXIT_OK


def _note_lost_rank(session: Session, problem: str) -> None:
    """Rank 0's last words when a rank is lost; called by the watchdog."""
    journal = session.journal
    if session.is_folder_ours():
        journal.event(EventKey.ATTEMPT_END, "failed", {"reason": "rank_lost"}, update=journal.last_update)
        journal.state("failed", journal.last_update, problem)
