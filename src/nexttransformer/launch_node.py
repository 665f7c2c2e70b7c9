"""One node's launcher of a job over several nodes, behind `launch/node.sh`: Accelerate, checked before it starts.

The command is the documented one (`accelerate launch --config_file launch/accelerate.yaml ...`), run in
this process, so that its end is the trainer's exit code and one line with rank and host. Nothing is
started before all variables and options are right and all nodes have met.
"""

import os
import signal
import sys
from pathlib import Path

from nexttransformer.errors import ConfigError, join_problems, run_command
from nexttransformer.launch import TRAIN_MODULE, supervise
from nexttransformer.launch_environment import node_problems
from nexttransformer.node_roll_call import meet, own_record

ACCELERATE_VERSION = "1.15.0"
_INSTALL_LINE = f"Run once: uv pip install accelerate=={ACCELERATE_VERSION}"


def accelerate_command(config_file: Path, arguments: list[str]) -> list[str]:
    """Returns the words after `accelerate launch` for this node, from the five variables of the job."""
    num_nodes, per_node = int(os.environ["NNODES"]), int(os.environ["GPUS_PER_NODE"])
    words = {
        "--config_file": str(config_file),
        "--num_machines": str(num_nodes),
        "--num_processes": str(num_nodes * per_node),
        "--machine_rank": os.environ["NODE_RANK"],
        "--main_process_ip": os.environ["MASTER_ADDR"],
        "--main_process_port": os.environ["MASTER_PORT"],
    }
    return [*(word for pair in words.items() for word in pair), "--module", TRAIN_MODULE, *arguments]


def accelerate_problem() -> str | None:
    """Returns what is wrong with the installed Accelerate, None if it is the one these files are written for."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("accelerate")
    except PackageNotFoundError:
        return f"accelerate is not installed for {sys.executable}. {_INSTALL_LINE}"
    return (
        None if found == ACCELERATE_VERSION else f"accelerate {found}: expected {ACCELERATE_VERSION}. {_INSTALL_LINE}"
    )


def main(argv: list[str] | None = None) -> int:
    """Usage: python -m nexttransformer.launch_node ACCELERATE_YAML [trainer arguments]."""
    config_file, *arguments = sys.argv[1:] if argv is None else argv
    problems = node_problems(os.environ)
    if (problem := accelerate_problem()) is not None:
        problems.append(problem)
    if problems:
        raise ConfigError(join_problems(problems))
    # Imported here, as it imports torch.
    from accelerate.commands.launch import launch_command, launch_command_parser

    from nexttransformer.training.options import parse_options

    # Without the job's variables: they are for launchers, which have started nothing yet.
    parse_options(arguments, {})
    num_nodes, processes = int(os.environ["NNODES"]), int(os.environ["GPUS_PER_NODE"])
    own = own_record(int(os.environ["NODE_RANK"]), num_nodes, processes, arguments)
    meet(own, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    # As launch/node.sh does: it would end the launcher and leave the trainer running.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    words = accelerate_command(Path(config_file), arguments)
    print(f"launch: node {os.environ['NODE_RANK']}: accelerate launch {' '.join(words)}", flush=True)
    parsed = launch_command_parser().parse_args(words)
    return supervise(lambda: launch_command(parsed), arguments, num_nodes * processes)


if __name__ == "__main__":
    run_command(main)
