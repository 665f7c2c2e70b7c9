"""Options of `train`: every problem of flags, method file, site file and launcher variables in one report.

Nothing here touches a GPU; problems show in seconds, before any process waits for another.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nexttransformer.config import ModelConfig, resolve_method
from nexttransformer.errors import ConfigError, NextTransformerError, join_problems, path_problem, suggest
from nexttransformer.protocol import FORMAL_V1, Protocol, get_protocol
from nexttransformer.site_config import SiteConfig, load_site_config, path_problems
from nexttransformer.training.launcher_command import launcher_problems, parent_command
from nexttransformer.training.process_place import ProcessPlace, place_problems, read_place
from nexttransformer.training.retention import Retention
from nexttransformer.training.run_schema import Mode

EVALUATIONS = {"bpb,core": frozenset({"bpb", "core"}), "bpb": frozenset({"bpb"}), "none": frozenset()}
# The flags a run can be started with. A test freezes them: adding one changes what a run may deviate in.
FLAGS = {
    "--config": ("FILE", "method configuration, configs/<family>/<method>.json"),
    "--site-config": ("FILE", "site file; default: NEXTTRANSFORMER_SITE_CONFIG, else ./site.local.json"),
    "--output": ("DIR", "run folder, new or to be continued"),
    "--micro-batch": ("N", "rows per process and pass; accumulation completes the global batch"),
    "--formal": (None, "formal run: only formal-v1, refuses any deviation"),
    "--smoke-steps": ("N", "first N updates of the real schedule; never becomes a formal run"),
    "--resume": ("auto|never|PATH", "continue the newest complete checkpoint (default auto), or a given one"),
    "--protocol": ("ID", "protocol (default formal-v1); not with --formal"),
    "--seed": ("N", "seed of the initial weights (default the protocol's); not with --formal"),
    "--updates": ("N", "open runs only: shorten run and schedules to N updates"),
    "--eval": ("bpb,core|bpb|none", "open runs only: which evaluations (default bpb,core)"),
    "--save-minutes": ("M", "save at least every M minutes (default 30)"),
    "--stop-minutes": ("M", "save and stop after M minutes"),
    "--keep-checkpoints": ("N", "newest complete checkpoints to keep (default 2, at least 1)"),
    "--keep-every": ("N", "keep checkpoints of every N-th update as well (default 0: none extra)"),
    "--no-compile": (None, "do not compile the model (CUDA only; slower)"),
}
T = TypeVar("T")


@dataclass(frozen=True)
class TrainOptions:
    """A checked launch. `num_updates` is the length of the schedules, `last_update` where the run ends."""

    config_path: Path
    config: ModelConfig
    site: SiteConfig
    output: Path
    micro_batch: int
    mode: Mode
    smoke_updates: int | None
    resume: str
    protocol: Protocol
    seed: int
    num_updates: int
    evaluations: frozenset[str]
    save_minutes: float
    stop_minutes: float | None
    retention: Retention
    is_compiled: bool
    place: ProcessPlace
    argv: tuple[str, ...] = ()

    @property
    def last_update(self) -> int:
        """Completed updates at which the run ends."""
        return self.num_updates if self.smoke_updates is None else self.smoke_updates


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage, so that its complaint joins the others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"train: {message}. 'train --help' lists the options.")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; values stay strings, `parse_options` checks them."""
    parser = _Parser(
        prog="python -m nexttransformer.train",
        description="Trains a method under a protocol. Repeating the command continues the run.",
        allow_abbrev=False,
    )
    for flag, (metavar, text) in FLAGS.items():
        if metavar is None:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


class _Problems:
    """Collects the problems of a launch."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def attempt(self, function: Callable[[], T]) -> T | None:
        """Runs a check; a user error or a path that the system refuses becomes problems."""
        try:
            return function()
        except NextTransformerError as error:
            self.lines += str(error).splitlines()
            return None
        except OSError as error:
            self.lines.append(path_problem(error))
            return None

    def number(self, flag: str, text: str | None, low: float, high: float | None, *, whole: bool = True) -> Any:
        """Returns the number of a flag, None where it is not given or wrong."""
        if text is None:
            return None
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= low and (high is None or value <= high):
            return value
        kind = "a whole number" if whole else "a number"
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        self.lines.append(f"{flag} {text}: expected {kind} {limit}.")
        return None


def parse_options(argv: list[str], environ: Mapping[str, str] | None = None) -> TrainOptions:
    """Checks a launch completely.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    environ = os.environ if environ is None else environ
    problems = _Problems()
    arguments, unknown = build_parser().parse_known_args(argv)
    problems.lines += [
        f"unknown option {name}.{suggest(name.split('=')[0], FLAGS)}" for name in unknown if name.startswith("-")
    ]
    problems.lines += [f"unexpected argument '{name}'." for name in unknown if not name.startswith("-")]
    problems.lines += [f"{text!a}: not text in UTF-8. Rename that path." for text in argv if not _is_text(text)]
    problems.lines += [
        f"{flag} is missing." for flag in ("--config", "--output", "--micro-batch") if not _value(arguments, flag)
    ]
    problems.lines += _contradictions(arguments)
    protocol = problems.attempt(lambda: get_protocol(arguments.protocol or FORMAL_V1.id)) or FORMAL_V1
    micro_batch = problems.number("--micro-batch", arguments.micro_batch, 1, protocol.global_batch_rows)
    updates = problems.number("--updates", arguments.updates, 1, protocol.num_updates)
    smoke = problems.number("--smoke-steps", arguments.smoke_steps, 1, protocol.num_updates)
    seed = problems.number("--seed", arguments.seed, 0, 2**31 - 1)
    save_minutes = problems.number("--save-minutes", arguments.save_minutes, 0, None, whole=False)
    stop_minutes = problems.number("--stop-minutes", arguments.stop_minutes, 0, None, whole=False)
    keep = problems.number("--keep-checkpoints", arguments.keep_checkpoints, 1, None)
    keep_every = problems.number("--keep-every", arguments.keep_every, 0, None)
    if arguments.eval is not None and arguments.eval not in EVALUATIONS:
        problems.lines.append(f"--eval {arguments.eval}: expected bpb,core, bpb or none.")
    problems.lines += problems.attempt(lambda: _path_problems(arguments)) or []
    site = problems.attempt(lambda: load_site_config(Path(arguments.site_config) if arguments.site_config else None))
    if site is not None:
        problems.lines += path_problems(site, "site file")
    problems.lines += place_problems(environ) + launcher_problems(parent_command(), environ)
    # Last: a method's own options are checked by its parts, which import torch.
    config = problems.attempt(lambda: resolve_method(Path(arguments.config), protocol)) if arguments.config else None
    if problems.lines:
        raise ConfigError(join_problems(problems.lines))
    assert site is not None and config is not None and micro_batch is not None
    mode: Mode = "formal" if arguments.formal else "smoke" if smoke is not None else "open"
    return TrainOptions(
        config_path=Path(arguments.config),
        config=config,
        site=site,
        output=Path(arguments.output),
        micro_batch=micro_batch,
        mode=mode,
        smoke_updates=smoke,
        resume=arguments.resume or "auto",
        protocol=protocol,
        seed=protocol.seed if seed is None else seed,
        num_updates=updates or protocol.num_updates,
        evaluations=EVALUATIONS[arguments.eval or "bpb,core"],
        save_minutes=30.0 if save_minutes is None else save_minutes,
        stop_minutes=stop_minutes,
        retention=Retention(2 if keep is None else keep, keep_every or 0),
        is_compiled=not arguments.no_compile,
        place=read_place(environ),
        argv=tuple(argv),
    )


def _is_text(text: str) -> bool:
    """Tells whether an argument can be written to the run's records: bytes that are no UTF-8 arrive as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _value(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag.strip("-").replace("-", "_"))


def _contradictions(arguments: argparse.Namespace) -> list[str]:
    problems = []
    is_given = {flag: _value(arguments, flag) not in (None, False) for flag in FLAGS}
    if arguments.formal:
        refused = ("--smoke-steps", "--protocol", "--seed", "--updates", "--eval")
        problems += [
            f"{flag} cannot be used with --formal, which fixes it. Remove one of them."
            for flag in refused
            if is_given[flag]
        ]
    elif is_given["--smoke-steps"]:
        problems += [
            f"{flag} cannot be used with --smoke-steps (open runs only). Remove one of them."
            for flag in ("--updates", "--eval")
            if is_given[flag]
        ]
    return problems


def _path_problems(arguments: argparse.Namespace) -> list[str]:
    problems = []
    if arguments.output and Path(arguments.output).exists() and not Path(arguments.output).is_dir():
        problems.append(f"--output {arguments.output}: is a file, expected a folder.")
    resume = arguments.resume or "auto"
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        problems.append(f"--resume {resume}: no such checkpoint folder. Expected auto, never or a folder.")
    return problems
