"""Checks of the variables that start a job, before any launcher runs. Imports nothing heavy.

A multi-node job is described by NNODES, GPUS_PER_NODE, NODE_RANK, MASTER_ADDR and MASTER_PORT, all or
none of them. Half-set, contradicting and non-integer values are listed, one line each.
"""

import argparse
import os
from collections.abc import Mapping, Sequence

from nexttransformer.errors import ConfigError, join_problems, run_command

JOB_VARIABLES = ("NNODES", "GPUS_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_LOWEST = {"NNODES": 1, "GPUS_PER_NODE": 1, "NODE_RANK": 0, "NPROC_PER_NODE": 1, "MASTER_PORT": 1024}
_HIGHEST_PORT = 65535
ACCELERATE_COMMAND = (
    "accelerate launch --config_file launch/accelerate.yaml --num_machines $NNODES "
    "--num_processes $((NNODES * GPUS_PER_NODE)) --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR "
    "--main_process_port $MASTER_PORT --module nexttransformer.train ..."
)


def number_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns one line for each set variable that is not a whole number in its range."""
    problems = []
    for name, lowest in _LOWEST.items():
        value = environ.get(name, "")
        if not value:
            continue
        is_port = name == "MASTER_PORT"
        expected = f"a port from {lowest} to {_HIGHEST_PORT}" if is_port else f"a whole number of at least {lowest}"
        is_number = value.isascii() and value.isdigit()
        if not is_number or int(value) < lowest or (is_port and int(value) > _HIGHEST_PORT):
            problems.append(f"{name}={value}: expected {expected}. Correct or unset it.")
    return problems


def local_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns what forbids a launch on this machine alone (`launch/train.sh`), one line each."""
    problems = number_problems(environ)
    is_number = {name: environ.get(name, "").isdigit() for name in (*_LOWEST, "WORLD_SIZE")}
    for name in _WORKER_VARIABLES:
        if environ.get(name):
            problems.append(
                f"{name}={environ[name]} is set: this shell is already a process of another launcher. "
                "Unset it, or start python -m nexttransformer.train from that launcher."
            )
    if is_number["NNODES"] and int(environ["NNODES"]) > 1:
        problems.append(
            f"NNODES={environ['NNODES']}: launch/train.sh starts one machine only. Use: {ACCELERATE_COMMAND}"
        )
    elif not environ.get("NNODES"):
        lonely = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
        if lonely:
            problems.append(
                f"{', '.join(lonely)} set without NNODES: half of a multi-node job. Unset for one machine, "
                f"or set all of {', '.join(JOB_VARIABLES)} and use: {ACCELERATE_COMMAND}"
            )
    elif is_number["NODE_RANK"] and int(environ["NODE_RANK"]) > 0:
        problems.append(f"NODE_RANK={environ['NODE_RANK']} contradicts NNODES=1: expected 0. Correct or unset it.")
    if is_number["NPROC_PER_NODE"] and is_number["GPUS_PER_NODE"]:
        if int(environ["NPROC_PER_NODE"]) != int(environ["GPUS_PER_NODE"]):
            problems.append(
                f"NPROC_PER_NODE={environ['NPROC_PER_NODE']} contradicts GPUS_PER_NODE={environ['GPUS_PER_NODE']}. "
                "Unset one of them."
            )
    return problems


def job_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with the variables of a job over several nodes, one line each."""
    problems = number_problems(environ)
    present = [name for name in JOB_VARIABLES if environ.get(name)]
    missing = [name for name in JOB_VARIABLES if not environ.get(name)]
    if present and missing:
        problems.append(f"{', '.join(missing)} not set although {', '.join(present)} set: set all of them or none.")
    num_nodes, node_rank = environ.get("NNODES", ""), environ.get("NODE_RANK", "")
    if num_nodes.isdigit() and node_rank.isdigit() and int(node_rank) >= max(1, int(num_nodes)):
        problems.append(f"NODE_RANK={node_rank} contradicts NNODES={num_nodes}: expected 0 to NNODES - 1.")
    return problems


def node_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns what forbids starting this node of a job (`launch/node.sh`), one line each."""
    if not any(environ.get(name) for name in JOB_VARIABLES):
        return [f"{', '.join(JOB_VARIABLES)} not set: set all of them on every node."]
    problems = job_problems(environ)
    for name in _WORKER_VARIABLES:
        if environ.get(name):
            problems.append(f"{name}={environ[name]} is set: another launcher started this process. Unset it.")
    for name in ("SLURM_GPUS_ON_NODE", "NPROC_PER_NODE"):
        given, other = environ.get("GPUS_PER_NODE", ""), environ.get(name, "")
        if given.isdigit() and other.isdigit() and int(given) != int(other):
            problems.append(f"GPUS_PER_NODE={given} contradicts {name}={other}. Unset one of them.")
    return problems


def option_value(arguments: Sequence[str], flag: str) -> str | None:
    """Returns the last value of `--flag VALUE` or `--flag=VALUE` among a command's arguments, None without one."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def main(argv: list[str] | None = None) -> int:
    """Checks the job's variables; `--local` and `--node` check them for one kind of launch."""
    parser = argparse.ArgumentParser(prog="python -m nexttransformer.launch_environment", description=main.__doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--local", action="store_true", help="one machine, as launch/train.sh")
    kind.add_argument("--node", action="store_true", help="a node of several, as launch/node.sh")
    given = parser.parse_args(argv)
    problems = (local_problems if given.local else node_problems if given.node else job_problems)(os.environ)
    if problems:
        raise ConfigError(join_problems(problems))
    return 0


if __name__ == "__main__":
    run_command(main)
