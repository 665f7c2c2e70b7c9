"""Options of `bench`: every problem of the command line in one report, before anything is built."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nexttransformer.config import ModelConfig, resolve_method
from nexttransformer.errors import ConfigError, NextTransformerError, join_problems, suggest
from nexttransformer.protocol import FORMAL_V1, PROTOCOLS, Protocol, get_protocol
from nexttransformer.site_config import SiteConfig, load_site_config
from nexttransformer.training.process_place import ProcessPlace, read_place

# Parts measured at each micro-batch, then those measured once for a configuration.
PASS_PARTS = ("step", "update", "breakdown", "roofline", "tiles")
JOB_PARTS = ("optimizer", "communication", "data", "evaluate", "checkpoint")
PARTS = (*PASS_PARTS, *JOB_PARTS)
DEFAULT_PARTS = tuple(part for part in PARTS if part != "tiles")
STATES = ("nonzero", "init")
PLOT_SUFFIXES = (".svg", ".html")


@dataclass(frozen=True)
class BenchOptions:
    """A checked command line.

    Attributes:
        configs: what to measure, in order.
        micro_batches: rows per process and pass; empty with `is_sweep`.
        accumulation: micro-batches per process and update; None is the protocol's own number.
        site: for prepared data, caches and scratch space; None: synthetic rows, temporary folders.
        num_gpus: devices of the run whose hours are projected.
    """

    configs: tuple[ModelConfig, ...]
    protocol: Protocol
    micro_batches: tuple[int, ...]
    is_sweep: bool
    num_steps: int
    num_warmup: int
    state: str
    accumulation: int | None
    is_compiled: bool
    parts: frozenset[str]
    site: SiteConfig | None
    num_gpus: int
    output: Path | None
    plot: Path | None
    trace: Path | None
    place: ProcessPlace


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"bench: {message}. 'bench --help' lists the options.")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; values stay strings, `parse_options` checks them."""
    parser = _Parser(
        prog="python -m nexttransformer.bench",
        description="Measures tokens per second, memory, MFU and where the time goes. Also under torchrun.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="method file; repeatable")
    parser.add_argument("--protocol", metavar="ID", default=FORMAL_V1.id, help=f"one of {', '.join(PROTOCOLS)}")
    parser.add_argument("--micro-batch", metavar="N,N", help="rows per process and pass; several are all measured")
    parser.add_argument("--sweep", action="store_true", help="double the micro-batch until it no longer fits")
    parser.add_argument("--steps", metavar="N", default="30", help="timed passes (default 30)")
    parser.add_argument("--warmup", metavar="N", default="4", help="passes before them, not timed (default 4)")
    parser.add_argument("--state", metavar="|".join(STATES), default="nonzero", help="weights (default nonzero)")
    parser.add_argument("--accumulation", metavar="N", help="micro-batches per update (default the protocol's)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the model (CUDA only)")
    shown = f"of {', '.join(PARTS)} (default all but tiles)"
    parser.add_argument("--parts", metavar="A,B", default=",".join(DEFAULT_PARTS), help=shown)
    parser.add_argument("--site-config", metavar="FILE", help="prepared data and folders; default: synthetic rows")
    parser.add_argument("--gpus", metavar="N", default="8", help="project a whole run on N devices (default 8)")
    parser.add_argument("--output", metavar="FILE", help="JSON with every figure, written after each part")
    parser.add_argument("--plot", metavar="FILE", help="a plot, .svg or .html")
    parser.add_argument("--trace", metavar="FILE", help="profiler trace (one config, one micro-batch)")
    return parser


def parse_options(argv: list[str], environ: Mapping[str, str] | None = None) -> BenchOptions:
    """Checks a command line completely.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    environ = os.environ if environ is None else environ
    arguments, unknown = build_parser().parse_known_args(argv)
    known = [name for action in build_parser()._actions for name in action.option_strings]
    problems = [f"bench: unknown option {name}.{suggest(name, known)}" for name in unknown]

    def whole(flag: str, text: str, high: int) -> int:
        if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= high:
            return int(text)
        problems.append(f"{flag} {text[:40]}: expected a whole number from 1 to {high:,}.")
        return 1

    protocol, configs, site = FORMAL_V1, [], None
    try:
        protocol = get_protocol(arguments.protocol)
    except NextTransformerError as error:
        problems.append(str(error))
    for file in arguments.config:
        try:
            configs.append(resolve_method(Path(file), protocol))
        except NextTransformerError as error:
            problems += str(error).splitlines()
    if not arguments.config:
        problems.append("--config is missing. Example: configs/baseline/dense_full.json.")
    if arguments.sweep == bool(arguments.micro_batch):
        problems.append("bench: give either --micro-batch, such as 8,16,32, or --sweep.")
    elif not arguments.sweep and not arguments.micro_batch.strip(","):
        problems.append(f"--micro-batch {arguments.micro_batch}: holds no number. Example: 8,16,32.")
    rows = protocol.global_batch_rows
    micro_batches = tuple(
        whole("--micro-batch", text, rows) for text in (arguments.micro_batch or "").split(",") if text
    )
    parts = frozenset(filter(None, arguments.parts.split(",")))
    problems += [f"--parts: unknown part '{name}'.{suggest(name, PARTS)}" for name in sorted(parts - set(PARTS))]
    if not parts:
        problems.append(f"--parts: empty. Choices: {', '.join(PARTS)}.")
    if arguments.state not in STATES:
        problems.append(f"--state {arguments.state}: expected {' or '.join(STATES)}.")
    if arguments.plot and Path(arguments.plot).suffix not in PLOT_SUFFIXES:
        problems.append(f"--plot {arguments.plot}: expected a name that ends in {' or '.join(PLOT_SUFFIXES)}.")
    for flag, path in (("--output", arguments.output), ("--plot", arguments.plot), ("--trace", arguments.trace)):
        if path and not Path(path).resolve().parent.is_dir():
            problems.append(f"{flag} {path}: no folder {Path(path).parent}. Make it first.")
    if arguments.trace and (len(arguments.config) > 1 or len(micro_batches) != 1 or "breakdown" not in parts):
        problems.append("--trace: needs one --config, one --micro-batch and the part 'breakdown'.")
    if arguments.site_config:
        try:
            site = load_site_config(Path(arguments.site_config))
        except NextTransformerError as error:
            problems += str(error).splitlines()
    numbers = {
        "num_steps": whole("--steps", arguments.steps, 100_000),
        "num_warmup": whole("--warmup", arguments.warmup, 100_000),
        "num_gpus": whole("--gpus", arguments.gpus, rows),
        "accumulation": whole("--accumulation", arguments.accumulation, rows) if arguments.accumulation else None,
    }
    place = ProcessPlace()
    try:
        place = read_place(environ)
    except NextTransformerError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError(join_problems(problems))
    return BenchOptions(
        configs=tuple(configs),
        protocol=protocol,
        micro_batches=micro_batches,
        is_sweep=arguments.sweep,
        state=arguments.state,
        is_compiled=not arguments.no_compile,
        parts=parts,
        site=site,
        output=Path(arguments.output) if arguments.output else None,
        plot=Path(arguments.plot) if arguments.plot else None,
        trace=Path(arguments.trace) if arguments.trace else None,
        place=place,
        **numbers,
    )
