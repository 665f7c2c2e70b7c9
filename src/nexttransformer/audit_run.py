"""Command: judges a finished run from its files. Exit code 0: passes; 1: refused; 2: cannot judge."""

import argparse
import re
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import AuditError, run_command
from nexttransformer.protocol import FORMAL_V1

METHOD_ID = re.compile(r"[a-z][a-z0-9_]*")


def main(argv: list[str] | None = None) -> int:
    """Audits a run folder, prints every finding and writes the audit file."""
    arguments = _parser().parse_args(argv)
    # Imported here: the help should not wait for torch.
    from nexttransformer.audit.reference import make_reference
    from nexttransformer.audit.report import audit_run, report_lines
    from nexttransformer.audit.waivers import committed_waivers
    from nexttransformer.data.manifest import check_protocol, load_manifest

    if not METHOD_ID.fullmatch(arguments.method):
        raise AuditError(f"--method {arguments.method}: expected a method id such as dense_full.")
    if arguments.deep and arguments.data is None:
        raise AuditError("--deep scores rows of the prepared data again. Name its folder with --data.")
    reference = make_reference(arguments.protocol, data_folder=arguments.data, is_deep=arguments.deep)
    if arguments.data is not None:
        check_protocol(load_manifest(arguments.data), reference.protocol, folder=arguments.data)
    output = arguments.output or default_output(arguments.method, reference.division)
    _check_output(output, arguments.run)
    record = audit_run(arguments.run, arguments.method, reference, committed_waivers(arguments.run))
    for line in report_lines(record):
        print(line)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        jsonio.write_bytes_atomic(output, record.to_bytes())
    except OSError as problem:
        raise AuditError(f"--output {output}: cannot be written: {problem.strerror}.") from None
    print(f"Written: {output}", flush=True)
    return record.exit_code


def default_output(method: str, division: str) -> Path:
    """Returns where the audit of a method goes: `evidence/audits/ID.json`, or its place in the demo division."""
    folder = Path("evidence/audits") if division == "formal" else Path("evidence/demo/audits")
    return folder / f"{method}.json"


def _check_output(output: Path, run: Path) -> None:
    """Refuses an output inside the run folder, which the audit only reads, or in place of something else."""
    if output.resolve().is_relative_to(run.resolve()):
        raise AuditError(f"--output {output}: inside the run folder, which the audit never changes. Choose another.")
    if output.is_dir():
        raise AuditError(f"--output {output}: is a folder. Name a file.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audit_run", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder that train wrote with --output")
    parser.add_argument("--method", required=True, metavar="ID", help="the method that the run is said to be of")
    parser.add_argument("--output", type=Path, metavar="FILE", help="audit file (default evidence/audits/ID.json)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data: recompute order and splits from it")
    parser.add_argument("--deep", action="store_true", help="score a slice again on this machine (needs --data)")
    parser.add_argument(
        "--protocol",
        default=FORMAL_V1.id,
        metavar="ID",
        help="formal-v1 (default), or demo-v1 or test-v1 for the demo division",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
