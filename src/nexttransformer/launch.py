"""One machine's launcher behind `launch/train.sh`: torchrun with a process for each visible GPU.

It adds to plain torchrun: checked variables, an exit code that is the trainer's own, one line that
names the rank that failed, SIGUSR1 and a second Ctrl-C passed on to the trainer, and no process left behind.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, join_problems, run_command
from nexttransformer.launch_environment import local_problems, option_value

TRAIN_MODULE = "nexttransformer.train"
# SIGUSR1 beside torchrun's own: otherwise it kills the launcher and leaves the trainer running.
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_INSTALL_LINE = "Run: bash launch/install.sh --gpu (or, to train on the CPU on purpose, export CUDA_VISIBLE_DEVICES=)"


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that torch sees.

    Raises:
        ConfigError: if this machine shows NVIDIA GPUs and torch is a build without CUDA.
    """
    import torch

    is_hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_driver = Path("/dev/nvidiactl").exists() and Path("/proc/driver/nvidia/version").exists()
    if has_driver and not is_hidden and torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(f"This machine has NVIDIA GPUs, but torch {torch.__version__} has no CUDA. {_INSTALL_LINE}.")
    return torch.cuda.device_count()


def num_processes(environ: Mapping[str, str], num_gpus: int) -> int:
    """Returns the number of processes to start: NPROC_PER_NODE, GPUS_PER_NODE, one a GPU, or one on the CPU.

    Raises:
        ConfigError: if more are asked for than GPUs are visible; without a GPU any number is allowed.
    """
    name = next((name for name in ("NPROC_PER_NODE", "GPUS_PER_NODE") if environ.get(name)), None)
    if name is None:
        return max(1, num_gpus)
    number = int(environ[name])
    if num_gpus and number > num_gpus:
        raise ConfigError(f"{name}={number}: only {num_gpus} GPUs are visible. Lower it or free the others.")
    return number


def launch(module: str, arguments: list[str], processes: int) -> int:
    """Runs a module in processes under torchrun and returns the exit code of the first that failed."""
    from torch.distributed import run as torchrun

    _pass_on_second_interrupt()
    options = ["--standalone", f"--nproc-per-node={processes}", f"--signals-to-handle={_FORWARDED}", "--module", module]
    return supervise(lambda: torchrun.run(torchrun.parse_args([*options, *arguments])), arguments, processes)


def supervise(run: Callable[[], None], arguments: list[str], processes: int) -> int:
    """Runs one of torch's launchers in this process and turns its end into the trainer's exit code and one line.

    A launch stopped by a signal returns 0 if the run folder says that the run was saved or finished.

    Args:
        run: starts the launcher and returns when all processes of this machine have ended.
        arguments: the trainer's, which name the run folder.
        processes: number of processes of the whole job.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The rank that failed is named below; torchrun says the same in many lines.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        is_signal = failure.exitcode < 0
        how = f"ended by {failure.signal_name()}" if is_signal else f"failed with exit code {failure.exitcode}"
        if is_signal or processes > 1:
            print(f"launch: rank {rank} of {processes} on {socket.gethostname()} {how}.", file=sys.stderr, flush=True)
        return 128 - failure.exitcode if is_signal else failure.exitcode
    except SignalException as stopped:
        remaining = _signal_children(signal.SIGKILL)
        if not remaining and _run_status(arguments) in ("stopped", "finished"):
            return EXIT_OK
        name = signal.Signals(stopped.sigval).name
        print(f"launch: ended by {name} before the run was saved.", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_OK


def _pass_on_second_interrupt() -> None:
    """Sends SIGINT to the trainer at the second Ctrl-C and each further one.

    torchrun passes on the first and then waits; the trainer ends at once at its second. The wake-up
    descriptor sees every signal, whatever handler torchrun has installed.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        num_interrupts = 0
        while number := os.read(reader, 1):
            num_interrupts += number[0] == signal.SIGINT
            if number[0] == signal.SIGINT and num_interrupts > 1:
                _signal_children(signal.SIGINT)

    threading.Thread(target=watch, daemon=True, name="interrupts").start()


def _signal_children(number: signal.Signals) -> list[int]:
    """Sends a signal to the process group of every live child that leads one, and returns those children."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child = int(stat.parent.name)
            # The second field is a name in parentheses that may hold anything.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z" and os.getpgid(child) == child:
                os.killpg(child, number)
                children.append(child)
    return children


def _run_status(arguments: list[str]) -> str | None:
    """Returns `status` of the run folder that the trainer's arguments name, None if there is none."""
    from nexttransformer.training.run_folder import RunFolder

    output = option_value(arguments, "--output")
    state = RunFolder(Path(output)).read_state() if output else None
    return state.status if state else None


def main(argv: list[str] | None = None) -> int:
    """Checks the variables, counts GPUs and runs the trainer with all arguments passed through."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        from nexttransformer import train

        return train.main(["--help"])
    problems = local_problems(os.environ)
    if problems:
        raise ConfigError(join_problems(problems))
    # Imported here, as it imports torch. Checked once here, so that mistakes are not told by every process.
    from nexttransformer.training.options import parse_options

    parse_options(arguments)
    num_gpus = visible_gpus(os.environ)
    processes = num_processes(os.environ, num_gpus)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    device = f"GPU of {num_gpus} visible" if num_gpus else "CPU (gloo)"
    print(f"launch: {processes} process{'es' if processes > 1 else ''} on this machine, {device}.", flush=True)
    return launch(TRAIN_MODULE, arguments, processes)


if __name__ == "__main__":
    run_command(main)
