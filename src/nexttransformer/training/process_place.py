"""Where this process stands in its job, read from the launcher's variables. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass

from nexttransformer.errors import ConfigError, join_problems
from nexttransformer.launch_environment import number_problems

_WORKER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_OPTIONAL = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class ProcessPlace:
    """One process of a job.

    `local_world_size`, `node_rank` and `num_nodes` are None where the launcher does not say; they are
    then counted from host names once the processes are connected.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    address: str | None = None
    port: int | None = None


def place_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns what is half-set, contradicting or not a number in the launcher's variables, one line each."""
    problems = number_problems(environ)
    given = {name: environ[name] for name in (*_WORKER, *_OPTIONAL) if environ.get(name)}
    bad = [name for name, value in given.items() if not (value.isascii() and value.isdigit())]
    problems += [f"{name}={environ[name]}: expected a whole number. The launcher sets it; unset it." for name in bad]
    problems += _half_set_problems(environ)
    if problems:
        return problems
    values = {name: int(value) for name, value in given.items()}
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE")):
        if name in values and limit in values and values[name] >= values[limit]:
            problems.append(f"{name}={values[name]} contradicts {limit}={values[limit]}: expected 0 to {limit} - 1.")
    return problems + _job_problems(environ, values)


def _half_set_problems(environ: Mapping[str, str]) -> list[str]:
    problems = []
    present = [name for name in _WORKER if environ.get(name)]
    wanted = _WORKER if environ.get("WORLD_SIZE") == "1" else (*_WORKER, *_ADDRESS)
    missing = [name for name in wanted if not environ.get(name)]
    if present and missing:
        problems.append(
            f"{', '.join(missing)} not set although {', '.join(present)} set: half of a launcher's variables. "
            "Start through launch/train.sh, torchrun or accelerate, or unset them."
        )
    if environ.get("NODE_RANK") and not environ.get("NNODES"):
        problems.append(f"NODE_RANK={environ['NODE_RANK']} set without NNODES: set both or none.")
    if not present and environ.get("NNODES", "1").isdigit() and int(environ.get("NNODES") or "1") > 1:
        problems.append(
            f"NNODES={environ['NNODES']}, but no launcher started this process (RANK is not set). "
            "Use accelerate launch with launch/accelerate.yaml on every node, or unset NNODES."
        )
    return problems


def _job_problems(environ: Mapping[str, str], values: Mapping[str, int]) -> list[str]:
    """Compares the job's own variables with the launcher's."""
    problems = []
    job = {name: int(environ[name]) for name in ("NNODES", "GPUS_PER_NODE", "NODE_RANK") if environ.get(name)}
    if "NNODES" in job and job.get("NODE_RANK", 0) >= job["NNODES"]:
        problems.append(f"NODE_RANK={job['NODE_RANK']} contradicts NNODES={job['NNODES']}: expected 0 to NNODES - 1.")
    if {"NNODES", "GPUS_PER_NODE"} <= job.keys() and "WORLD_SIZE" in values:
        expected = job["NNODES"] * job["GPUS_PER_NODE"]
        if values["WORLD_SIZE"] != expected:
            problems.append(
                f"WORLD_SIZE={values['WORLD_SIZE']}: the launcher started another number of processes than NNODES x "
                f"GPUS_PER_NODE = {job['NNODES']} x {job['GPUS_PER_NODE']} = {expected}. "
                f"Pass --num_processes {expected}."
            )
    for name, launcher in (("NODE_RANK", "GROUP_RANK"), ("NNODES", "GROUP_WORLD_SIZE")):
        if name in job and launcher in values and job[name] != values[launcher]:
            problems.append(
                f"{name}={job[name]} contradicts {launcher}={values[launcher]} of the launcher. "
                "Read the node's rank and count on the node itself."
            )
    if {"LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"} <= values.keys():
        expected = values["LOCAL_WORLD_SIZE"] * values["GROUP_WORLD_SIZE"]
        if values["WORLD_SIZE"] != expected:
            problems.append(
                f"WORLD_SIZE={values['WORLD_SIZE']}, expected {values['GROUP_WORLD_SIZE']} nodes x "
                f"{values['LOCAL_WORLD_SIZE']} processes = {expected}. Start equally many on every node."
            )
    return problems


def read_place(environ: Mapping[str, str]) -> ProcessPlace:
    """Returns this process's place; without launcher variables it is the only process.

    Raises:
        ConfigError: with every problem of `place_problems`.
    """
    problems = place_problems(environ)
    if problems:
        raise ConfigError(join_problems(problems))
    if not environ.get("RANK"):
        return ProcessPlace()

    def number(*names: str) -> int | None:
        return next((int(environ[name]) for name in names if environ.get(name)), None)

    return ProcessPlace(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=number("LOCAL_WORLD_SIZE"),
        node_rank=number("GROUP_RANK", "NODE_RANK"),
        num_nodes=number("GROUP_WORLD_SIZE", "NNODES"),
        address=environ.get("MASTER_ADDR") or None,
        port=number("MASTER_PORT"),
    )
