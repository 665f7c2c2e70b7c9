"""Errors a user can cause, and the one place that turns them into a line and an exit code."""

import difflib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# As of a process that SIGPIPE ended.
_EXIT_UNREAD = 141
# What a path that the user named, or the disk under it, can do to any command. Other system errors are ours.
_PATH_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOSPC,
        errno.EDQUOT,
    }
)


class NextTransformerError(Exception):
    """A problem the user can act on. Its text is one line: what, where, expected, what to do."""


class ConfigError(NextTransformerError):
    """A configuration file, flag or environment variable is wrong."""


class NodeError(ConfigError):
    """A problem that other nodes need not see (its GPUs, its way to the others): every node tells its own."""


class DataError(NextTransformerError):
    """Data, tokenizer or bundle files are missing, damaged or too short."""


class CheckpointError(NextTransformerError):
    """A checkpoint or run folder cannot be used or written."""


class ProtocolError(NextTransformerError):
    """A request would deviate from the protocol."""


class AuditError(NextTransformerError):
    """A run cannot be judged or exported."""


class RunFailure(NextTransformerError):
    """A run started well and failed (non-finite loss, lost rank, failed save): exit code 1."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the nearest choice, else the list of choices."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Choices: {', '.join(known)}." if known else ""


def join_problems(problems: list[str]) -> str:
    """Joins the problems of one file into one message, one problem a line."""
    return "\n".join(problems)


def path_problem(error: OSError) -> str:
    """Returns the line about a path that the system refused; a very long path is shown by its start and end."""
    name = str(error.filename)
    shown = name if len(name) <= 200 else f"{name[:100]}...{name[-40:]}"
    return f"{shown}: cannot be used: {error.strerror}. Choose another path, or correct its permissions or disk."


def _is_output_unread() -> bool:
    """Returns whether standard output is a pipe whose reader has left, as with `| head`."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_output_refused(number: int | None) -> bool:
    """Returns whether standard output cannot be written for this reason (an errno), as on a full disk."""
    try:
        # What failed is no longer in Python's buffer.
        print(flush=True)
    except OSError as error:
        return error.errno == number
    return False


def _drop_output() -> None:
    # Python would flush, and complain, once more at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush_output() -> None:
    # None where the caller closed it.
    if sys.stdout is not None:
        sys.stdout.flush()


def run_command(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> None:
    """Runs a command's `main` and exits the process with its code.

    User errors end in their own text on stderr and exit code 2, as do paths that the system refuses (no
    permission, too long, a full disk) and an output that cannot be written; failed runs in exit code 1, Ctrl-C
    in 130, an output that nobody reads any more in 141. Anything else is our bug and keeps its traceback.
    """
    try:
        code = _run(main, argv)
        _flush_output()
    except BrokenPipeError:
        if not _is_output_unread():
            raise
        _drop_output()
        code = _EXIT_UNREAD
    except OSError as error:
        if error.filename is not None or not _is_output_refused(error.errno):
            raise
        print(f"standard output: cannot be written: {error.strerror}. Send it elsewhere.", file=sys.stderr, flush=True)
        _drop_output()
        code = EXIT_USAGE
    sys.exit(code)


def _run(main: Callable[[list[str] | None], int], argv: list[str] | None) -> int | str | None:
    """Returns the exit code of a command, its error printed."""
    try:
        return main(argv)
    except SystemExit as end:
        # rich answers an output that nobody reads with exit code 1; else it is argparse that ends the command.
        return _EXIT_UNREAD if isinstance(end.__context__, BrokenPipeError) else end.code
    except RunFailure as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED
    except NextTransformerError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_USAGE
    except OSError as error:
        if error.filename is None or error.errno not in _PATH_ERRORS:
            raise
        print(path_problem(error), file=sys.stderr, flush=True)
        return EXIT_USAGE
    except RuntimeError as error:
        # What pathlib raises for a circle of links before Python 3.13; its text names the path.
        if not str(error).startswith("Symlink loop"):
            raise
        print(f"{str(error)[:300]}: expected a file or folder. Correct the link.", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("Interrupted. Repeat the same command to continue.", file=sys.stderr, flush=True)
        return 130
