"""Command: checks methods in seconds on a CPU: budget, counted weights, causality, gradients, optimizer groups.

Exit code 0 if all pass, 1 if one is refused, 2 for a wrong option or file.
"""

import argparse
import sys
import time
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.config import MethodConfig, load_method, method_files
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, join_problems, run_command
from nexttransformer.protocol import PROTOCOLS, get_protocol


def main(argv: list[str] | None = None) -> int:
    """Checks the methods asked for and prints findings and a table; returns the exit code."""
    arguments = _parser().parse_args(argv)
    protocol = get_protocol(arguments.protocol)
    methods = _load(arguments)
    # Imported here: usage errors should not wait for torch.
    import torch

    from nexttransformer.checking.findings import refusals
    from nexttransformer.checking.method import check_method
    from nexttransformer.checking.table import markdown_table, sorted_reports, text_table, to_json

    # Tiny models: threads would only wait for each other, the more so on a busy machine.
    torch.set_num_threads(1)
    stream = sys.stderr if arguments.markdown else sys.stdout
    reports, start = [], time.monotonic()
    for index, method in enumerate(methods, 1):
        begin = time.monotonic()
        report = check_method(method, protocol)
        reports.append(report)
        verdict = "passed" if report.is_passed else f"refused ({len(refusals(report.findings))})"
        seconds = time.monotonic() - begin
        print(f"[{index}/{len(methods)}] {method.method}: {verdict}, {seconds:.1f} s", file=stream)
        for finding in report.findings:
            kind = "refused" if finding.is_refusal else "note"
            print(f"  {method.method}: {kind}: {finding}", file=stream, flush=True)
    reports = sorted_reports(reports)
    if arguments.markdown:
        print(markdown_table(reports))
    else:
        print(f"\n{protocol.id}\n{text_table(reports)}\n")
    if arguments.json is not None:
        try:
            jsonio.write_json_atomic(arguments.json, to_json(reports, protocol))
        except OSError as problem:
            reason = f"cannot be written: {problem.strerror}. Choose another file."
            raise ConfigError(f"--json {str(arguments.json)[:200]}: {reason}") from None
        print(f"Written: {arguments.json}", file=stream)
    num_refused = sum(not report.is_passed for report in reports)
    total = time.monotonic() - start
    print(f"{len(reports)} checked, {num_refused} refused, {total:.0f} s.", file=stream)
    return EXIT_FAILED if num_refused else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nexttransformer.check_method", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", help="configs/<family>/<method>.json")
    parser.add_argument("--all", action="store_true", help="every registered method")
    parser.add_argument("--protocol", default="formal-v1", metavar="ID", help=f"one of {', '.join(PROTOCOLS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write figures and findings to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as in docs/en/methods.md")
    return parser


def _load(arguments: argparse.Namespace) -> list[MethodConfig]:
    """Reads every file asked for; raises ConfigError with the problems of all of them."""
    problems = []
    if arguments.all == bool(arguments.configs):
        problems.append("check_method: name method files or use --all, not both. Example: configs/linear/gdn.json.")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        problems.append(f"--json {arguments.json}: no folder {arguments.json.parent}. Make it first.")
    elif arguments.json is not None and arguments.json.is_dir():
        problems.append(f"--json {arguments.json}: is a folder. Name a file.")
    methods = []
    for path in method_files().values() if arguments.all else arguments.configs:
        try:
            methods.append(load_method(path))
        except ConfigError as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(join_problems(problems))
    return methods


if __name__ == "__main__":
    run_command(main)
