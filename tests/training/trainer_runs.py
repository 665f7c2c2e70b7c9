"""Runs the real trainer in this process or in several, with faults injected at named points."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nexttransformer.errors import NextTransformerError
from nexttransformer.training.distributed import Limits
from nexttransformer.training.options import parse_options
from nexttransformer.training.session import Hook
from tests.distributed import run_ranks

CONFIG = Path(__file__).parents[2] / "configs/baseline/dense_full.json"
# What a line of metrics says about the machine rather than the run.
TIMES = ("attempt", "seconds", "tokens_per_second", "peak_memory_bytes", "mfu_fraction")
SHORT = Limits(beat=0.25, heartbeat=3.0, stall=2.0, first_updates=6.0, retry_final_save=0.1, folder=1.5, lock_watch=1.0)


def arguments(site: Path, output: Path, *more: str, micro_batch: int = 8, config: Path = CONFIG) -> list[str]:
    """Returns the command line of an open test-v1 run without evaluations, unless `more` says otherwise."""
    words = ["--config", config, "--site-config", site, "--output", output, "--micro-batch", micro_batch, *more]
    if "--protocol" not in more and "--formal" not in more:
        words += ["--protocol", "test-v1"]
    if not {"--eval", "--formal", "--smoke-steps"} & set(more):
        words += ["--eval", "none"]
    return [str(word) for word in words]


def fill_zero_outputs(model: torch.nn.Module) -> None:
    """Gives W_o, W_2 and the smear scale values, so that rounding decides nothing at update 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight") or name == "smear_lambda":
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def act(name: str, thing: Any) -> None:
    """Does what a fault says."""
    if name == "nan":
        thing.fill_(float("nan"))
    elif name == "infinite_gradient":
        thing["lm_head.weight"].grad.view(-1)[3] = float("inf")
    elif name == "fill":
        fill_zero_outputs(thing)
    elif name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, name))
    elif name == "sleep":
        time.sleep(3600)
    elif name == "raise":
        raise ValueError("injected")
    elif name == "zero_gradient":
        thing["x0_lambdas"].grad.zero_()
    elif name == "drop_gradient":
        thing["x0_lambdas"].grad = None
    elif name.startswith("touch "):
        Path(name.removeprefix("touch ")).touch()
    else:
        raise AssertionError(name)


def make_hook(faults: list[tuple[str, int, int, str]], rank: int) -> Hook:
    """Returns a hook for faults (point, completed updates or -1 for any, rank, what `act` does)."""

    def hook(point: str, update: int, thing: Any) -> None:
        for wanted_point, wanted_update, wanted_rank, name in faults:
            if (point, rank) == (wanted_point, wanted_rank) and wanted_update in (update, -1):
                act(name, thing)

    return hook


def train_rank(
    rank: int, world_size: int, words: list[str], faults: list[tuple[str, int, int, str]], limits: Limits | None = None
) -> tuple[int, str]:
    """Runs one rank as `train` would; returns exit code and the text of a refusal."""
    from nexttransformer.training.attempt import run_training

    # A frozen garbage collector would outlive the run in a test process; run_training thaws it.
    try:
        return run_training(parse_options(words), limits=limits, hook=make_hook(faults, rank)), ""
    except NextTransformerError as error:
        return 2, str(error)


def train(
    words: list[str],
    *,
    world_size: int = 1,
    faults: list[tuple[str, int, int, str]] | None = None,
    limits: Limits | None = None,
    limit_seconds: float = 120.0,
) -> list[tuple[int, str]]:
    """Runs the trainer on some ranks; returns (exit code, refusal) of each. One rank runs in this process."""
    faults = faults or []
    if world_size == 1:
        return [train_rank(0, 1, words, faults, limits)]
    return run_ranks(train_rank, world_size, words, faults, limits, with_group=False, limit_seconds=limit_seconds)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the effective metrics lines by update, without what differs between machines."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    effective = {line["update"]: line for line in lines}
    return [
        {key: value for key, value in effective[update].items() if key not in TIMES} for update in sorted(effective)
    ]


def events(folder: Path, key: str) -> list[dict[str, Any]]:
    """Returns the events of a key."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["key"] == key]


def state(folder: Path) -> dict[str, Any]:
    """Returns `run_state.json`."""
    return json.loads((folder / "run_state.json").read_text())


def checkpoint_tensors(path: Path) -> dict[str, Tensor]:
    """Returns weights and optimizer state of a checkpoint, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    assert tensors, f"{path} has no tensors"
    return tensors


def fraction_beyond(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> float:
    """Returns the largest fraction of a weight tensor's elements that differ by more than `tolerance`.

    A fraction, not the largest difference: with Adam's eps of 1e-10 the step of an element whose gradient
    is nearly zero is decided by rounding alone, so a handful in a table of 32,768 may move by 1e-2. A wrong
    share or weight would move nearly all of them.
    """
    assert first.keys() == second.keys()
    weights = [name for name in first if "::" not in name]
    return max(((first[name] - second[name]).abs() > tolerance).float().mean().item() for name in weights)
