"""Command: writes an audited run's record, weights and model card. Exit code 0: written; 1: refused; 2: usage."""

import argparse
import re
from pathlib import Path

from nexttransformer.errors import EXIT_FAILED, EXIT_OK, AuditError, ConfigError, join_problems, run_command

METHOD_ID = re.compile(r"[a-z][a-z0-9_]*")


def main(argv: list[str] | None = None) -> int:
    """Exports a run whose audit passes."""
    arguments = _parser().parse_args(argv)
    _check_arguments(arguments)
    # Imported here: the help should not wait for torch.
    from nexttransformer.audit.report import AuditRecord
    from nexttransformer.export.push import check_repository, push_folder
    from nexttransformer.export.record import DEMO_MARK, record_path
    from nexttransformer.export.run_export import Request, export_or_findings

    if arguments.push is not None:
        check_repository(arguments.push)
    division = AuditRecord.read(arguments.audit, AuditError).division
    request = Request(
        run=arguments.run,
        method=arguments.method,
        display_name=arguments.name,
        audit=arguments.audit,
        output=arguments.output or record_path(Path("evidence"), division, arguments.method),
        folder=arguments.export_dir or arguments.run / "export",
        submission=arguments.submission,
        site=arguments.site_config,
        say=lambda line: print(line, flush=True),
    )
    exported = export_or_findings(request)
    for finding in exported.findings:
        print(finding.line())
    mark = f" in the {DEMO_MARK} division" if division == "demo" else ""
    record = exported.record
    if record is None:
        print(f"{arguments.method} is not exported{mark}: {len(exported.findings)} errors. Nothing was written.")
        return EXIT_FAILED
    for note in exported.notes:
        print(f"Note: {note}")
    print(f"Written: {request.output} (record {record.record_digest[:16]}{mark})")
    print(f"Written: {request.folder} ({len(record.digests.package)} files)")
    if arguments.push is not None:
        print(f"Pushed: {push_folder(request.folder, arguments.push, record)}")
    return EXIT_OK


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Refuses arguments that no run can have, all together."""
    problems = []
    if not METHOD_ID.fullmatch(arguments.method):
        problems.append(f"--method {arguments.method}: expected a method id such as dense_full.")
    name = arguments.name
    if not name.strip() or name != name.strip() or len(name) > 120 or not name.isprintable() or set("<>") & set(name):
        problems.append(f"--name {name!r}: expected one line of 1 to 120 characters without < and >.")
    for option, path in (("--output", arguments.output), ("--export-dir", arguments.export_dir)):
        if path is not None and not path.name:
            problems.append(f"{option} {path}: expected a path that ends in a name.")
    if arguments.output is not None and arguments.output.is_dir():
        problems.append(f"--output {arguments.output}: is a folder. Name a file.")
    if problems:
        raise ConfigError(join_problems(problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="export_run", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder that train wrote with --output")
    parser.add_argument("--method", required=True, metavar="ID", help="the method that the run is of")
    parser.add_argument("--name", required=True, metavar="NAME", help='name on pages, such as "Dense Baseline"')
    parser.add_argument(
        "--audit", type=Path, required=True, metavar="FILE", help="the run's audit, as audit_run wrote it"
    )
    parser.add_argument("--export-dir", type=Path, metavar="DIR", help="folder of the package (default RUN_DIR/export)")
    parser.add_argument(
        "--submission", type=Path, metavar="FILE", help="JSON with authors, licence, citation, links, supersedes"
    )
    parser.add_argument("--push", metavar="REPO", help="also upload the package to OWNER/NAME on the Hugging Face Hub")
    parser.add_argument("--output", type=Path, metavar="FILE", help="record (default evidence/runs/ID.json)")
    parser.add_argument(
        "--site-config", type=Path, metavar="FILE", help="site file; its data holds the run's tokenizer"
    )
    return parser


if __name__ == "__main__":
    run_command(main)
