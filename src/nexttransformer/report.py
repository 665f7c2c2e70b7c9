"""Command: one self-contained page about one or several runs, finished or running."""

import argparse
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import EXIT_OK, CheckpointError, ConfigError, join_problems, run_command
from nexttransformer.reporting.page import render_report
from nexttransformer.reporting.run_view import RunView, read_run
from nexttransformer.reporting.summary import one_line
from nexttransformer.reporting.svg import draw_svg
from nexttransformer.reporting.words import LANGUAGES, words_of

_OUTPUT_NAME = "report.html"
_RUN_FILES = ("run.json", "run_state.json", "events.jsonl", "metrics.jsonl")


def main(argv: list[str] | None = None) -> int:
    """Writes the page and prints where it is and what could not be read."""
    arguments = _parser().parse_args(argv)
    output = arguments.output or (arguments.runs[0] / _OUTPUT_NAME if len(arguments.runs) == 1 else Path(_OUTPUT_NAME))
    _check_outputs(output, arguments.svg, arguments.runs)
    runs = _read_all(arguments.runs)
    _write(output, render_report(runs, arguments.lang), "--output")
    if arguments.svg is not None:
        _write(arguments.svg, draw_svg(runs, words_of(arguments.lang)), "--svg")
    for run in runs:
        print(f"{run.name}: {one_line(run)}")
        for line in run.problems:
            print(f"{run.name}: could not be read: {line}")
    print(f"Written: {output}" + (f", {arguments.svg}" if arguments.svg else ""))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="report", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder; of several, the first is the reference"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"default: RUN/{_OUTPUT_NAME}, for several runs ./{_OUTPUT_NAME}"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write loss and BPB as one static SVG file")
    parser.add_argument("--lang", choices=LANGUAGES, default="en", help="language of the page (default: en)")
    return parser


def _check_outputs(output: Path, svg: Path | None, roots: list[Path]) -> None:
    """Refuses one name for both files, and the place of a file that a run consists of."""
    own = {(root / name).absolute() for root in roots for name in _RUN_FILES}
    named = (("--output", output), ("--svg", svg))
    problems = [
        f"{flag} {path}: is a file of the run, which the report never changes. Choose another file."
        for flag, path in named
        if path is not None and path.absolute() in own
    ]
    if svg is not None and svg.absolute() == output.absolute():
        problems.append(f"--svg {svg}: is the file of the page as well. Choose another file.")
    if problems:
        raise ConfigError(join_problems(problems))


def _read_all(roots: list[Path]) -> list[RunView]:
    """Reads every folder; raises CheckpointError naming all that are no runs."""
    runs, problems = [], []
    for root, name in zip(roots, run_names(roots), strict=True):
        try:
            runs.append(read_run(root, name))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(join_problems(problems))
    return runs


def run_names(roots: list[Path]) -> list[str]:
    """Returns one name for each run: the folder's, with as many parents as tell equal ones apart."""
    parts = [root.resolve().parts for root in roots]
    names = [each[-1] for each in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = [
            "/".join(each[-depth:]) if names.count(name) > 1 else name for name, each in zip(names, parts, strict=True)
        ]
    return names


def _write(path: Path, content: str, flag: str) -> None:
    try:
        jsonio.write_bytes_atomic(path, content.encode("utf-8"))
    except OSError as problem:
        raise ConfigError(f"{flag} {path}: cannot be written: {problem.strerror}. Choose another file.") from None


if __name__ == "__main__":
    run_command(main)
