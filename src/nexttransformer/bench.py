"""Command: tokens per second, memory, MFU and where the time goes, of one configuration or several, on any ranks."""

import os
import sys
from typing import TYPE_CHECKING

from nexttransformer import jsonio
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, NextTransformerError, run_command

if TYPE_CHECKING:
    from nexttransformer.benchmark.options import BenchOptions

# Seconds after which a collective of a benchmark has failed: compilation included.
_COLLECTIVE_SECONDS = 600


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; exit code 0, 1 if a part could not be measured, 2 for a wrong option."""
    # Imported here: torch takes seconds, and `--help` of all commands should answer at once.
    from nexttransformer.benchmark.options import build_parser, parse_options

    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        build_parser().print_help()
        return EXIT_OK
    try:
        options = parse_options(arguments)
        return _measure(options)
    except NextTransformerError:
        # Every rank sees the same mistake; one says it.
        if _is_main():
            raise
        return EXIT_USAGE


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _measure(options: "BenchOptions") -> int:
    from rich.console import Console

    from nexttransformer.benchmark.plot import draw_plot, plot_page
    from nexttransformer.benchmark.render import render
    from nexttransformer.benchmark.runner import Benchmark
    from nexttransformer.training.distributed import Limits, connect, disconnect

    world = connect(options.place, Limits(first_updates=_COLLECTIVE_SECONDS, control=_COLLECTIVE_SECONDS))
    console = Console(highlight=False, soft_wrap=True, quiet=not world.is_main)
    is_clean = False
    try:
        benchmark = Benchmark(options, world, say=lambda line: console.print(f"... {line}", markup=False))
        record = benchmark.run()
        is_clean = True
    finally:
        disconnect(world, is_clean=is_clean)
    if world.is_main:
        console.print(render(record))
        if options.plot is not None:
            content = plot_page(record) if options.plot.suffix == ".html" else draw_plot(record)
            try:
                jsonio.write_bytes_atomic(options.plot, content.encode())
            except OSError as error:
                raise ConfigError(f"--plot {options.plot}: cannot be written: {error.strerror}.") from None
        written = [str(path) for path in (options.output, options.plot, options.trace) if path is not None]
        if written:
            console.print(f"Written: {', '.join(written)}", markup=False)
    return EXIT_FAILED if record["problems"] else EXIT_OK


if __name__ == "__main__":
    run_command(main)
