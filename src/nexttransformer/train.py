"""Command: trains a method under a protocol; repeating the command continues the run."""

import sys

from nexttransformer.errors import EXIT_FAILED, EXIT_USAGE, NextTransformerError, NodeError, RunFailure, run_command
from nexttransformer.training.options import TrainOptions, build_parser, parse_options


def main(argv: list[str] | None = None) -> int:
    """Checks the launch, then trains. Exit code 0: finished, or stopped and saved; 1: failed; 2: refused."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        build_parser().print_help()
        return 0
    options = _one_complains_per_node(arguments)
    if options is None:
        return EXIT_USAGE
    # Imported here: a mistake in a flag should not wait for torch's distributed parts.
    from nexttransformer.training.attempt import run_training

    try:
        return run_training(options)
    except NextTransformerError as error:
        if options.place.rank == 0 or (isinstance(error, NodeError) and options.place.local_rank == 0):
            raise
        return EXIT_FAILED if isinstance(error, RunFailure) else EXIT_USAGE


def _one_complains_per_node(arguments: list[str]) -> TrainOptions | None:
    """Parses on every rank; all ranks of a node see the same mistakes, so only the first of them prints."""
    import os

    try:
        return parse_options(arguments)
    except NextTransformerError:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        return None


if __name__ == "__main__":
    run_command(main)
