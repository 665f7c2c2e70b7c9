"""Command: evaluates one checkpoint (BPB and CORE) on any number of processes and writes one JSON file."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, join_problems, run_command, suggest
from nexttransformer.site_config import load_site_config
from nexttransformer.training.process_place import read_place

METRICS = ("bpb", "core")
MAX_MICRO_BATCH = 512
MAX_LIMIT = 1_000_000


def main(argv: list[str] | None = None) -> int:
    """Evaluates; returns 0 if all requested values are present, 1 if one is missing (the file says why)."""
    arguments = _parser().parse_args(argv)
    metrics = _check(arguments)
    site = load_site_config(arguments.site_config)
    place = read_place(os.environ)
    # Imported here: usage errors should not wait for torch.
    from nexttransformer.evaluation.results import check_output, print_record, write_record
    from nexttransformer.evaluation.scoring import evaluate_checkpoint, open_checkpoint
    from nexttransformer.models import config_from_dict
    from nexttransformer.training.collectives import on_rank0
    from nexttransformer.training.distributed import Limits, connect, disconnect
    from nexttransformer.training.kernel_tuning import restore_tiles

    world = connect(place, Limits())
    is_clean = False
    try:
        checkpoint = open_checkpoint(arguments.checkpoint, world.control)
        on_rank0(lambda: check_output(arguments.output, checkpoint.complete_digest), world.control)
        console = Console()
        restore_tiles(
            config_from_dict(checkpoint.model_config),
            checkpoint.path,
            control=world.control,
            device=world.device,
            cache_root=site.cache_root,
        )
        record = evaluate_checkpoint(
            checkpoint,
            site,
            kind="standalone",
            want_bpb="bpb" in metrics,
            want_core="core" in metrics,
            micro_batch=arguments.micro_batch,
            device=world.device,
            collectives=world.control,
            limit=arguments.limit,
            console=console,
        )
        if world.is_main:
            write_record(arguments.output, record)
            print_record(record, console)
            console.print(f"Written: {arguments.output}", markup=False, highlight=False, soft_wrap=True)
        is_clean = True
    finally:
        disconnect(world, is_clean=is_clean)
    return EXIT_FAILED if record.errors else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint folder, anywhere")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--micro-batch", type=int, required=True, metavar="N", help="rows per process and pass (BPB)")
    parser.add_argument("--eval", default="bpb,core", metavar="LIST", help="bpb,core (default), bpb or core")
    parser.add_argument("--site-config", type=Path, metavar="FILE", help="site file; default: as every command")
    parser.add_argument("--limit", type=int, metavar="N", help="CORE rows per task; the result is labelled limited")
    return parser


def _check(arguments: argparse.Namespace) -> set[str]:
    """Returns the metrics asked for; raises ConfigError with every bad flag."""
    problems = []
    if not 1 <= arguments.micro_batch <= MAX_MICRO_BATCH:
        problems.append(
            f"--micro-batch {arguments.micro_batch}: expected a whole number of rows from 1 to {MAX_MICRO_BATCH}."
        )
    metrics = arguments.eval.split(",")
    unknown = [name for name in metrics if name not in METRICS]
    problems += [f"--eval {arguments.eval}: unknown metric '{name}'.{suggest(name, METRICS)}" for name in unknown]
    if arguments.limit is not None and not 1 <= arguments.limit <= MAX_LIMIT:
        problems.append(f"--limit {str(arguments.limit)[:40]}: expected a whole number of rows from 1 to {MAX_LIMIT}.")
    if arguments.limit is not None and "core" not in metrics:
        problems.append(f"--limit {arguments.limit}: without effect, CORE is not asked for. Leave it out.")
    if problems:
        raise ConfigError(join_problems(problems))
    return set(metrics)


if __name__ == "__main__":
    run_command(main)
