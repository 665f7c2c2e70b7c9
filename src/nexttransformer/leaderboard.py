"""Command: builds the static leaderboard pages from the records in evidence/."""

import argparse
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.board.render import LISTING, render_site
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, NextTransformerError, run_command


def main(argv: list[str] | None = None) -> int:
    """Writes the pages, or with `--check` compares them; returns 1 if they differ."""
    arguments = _parser().parse_args(argv)
    if not arguments.evidence.is_dir():
        raise ConfigError(f"--evidence {arguments.evidence}: no such folder. Run the command in the repository's root.")
    files = render_site(arguments.evidence)
    differing = differences(files, arguments.output)
    if arguments.check:
        for name, problem in differing:
            print(f"{arguments.output / name}: {problem}")
        print(f"{len(files)} files compared, {len(differing)} differ.")
        return EXIT_FAILED if differing else EXIT_OK
    _write(files, differing, arguments.output)
    print(f"Written: {arguments.output} ({len(files)} files, {len(differing)} changed). Open index.html in it.")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="leaderboard", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--evidence", type=Path, default=Path("evidence"), metavar="DIR", help="records and audits (default: evidence)"
    )
    parser.add_argument("--output", type=Path, default=Path("site"), metavar="DIR", help="pages (default: site)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the pages are not what they should be"
    )
    return parser


def differences(files: dict[str, bytes], folder: Path) -> list[tuple[str, str]]:
    """Compares a rendered site with a folder: (name, problem) of what is missing, different or left over.

    Left over are files that an earlier build listed; anything else in the folder is not this command's.
    """
    found = []
    for name, content in files.items():
        path = folder / name
        if not path.is_file():
            found.append((name, "missing"))
        elif path.read_bytes() != content:
            found.append((name, "differs"))
    found += [(name, "left over") for name in _listed(folder) if name not in files and (folder / name).is_file()]
    return sorted(found)


def _listed(folder: Path) -> list[str]:
    """Returns what an earlier build wrote; nothing if its list is missing or damaged."""
    try:
        names = jsonio.read_json(folder / LISTING)
    except NextTransformerError:
        return []
    return [name for name in names if _is_inside(name)] if isinstance(names, list) else []


def _is_inside(name: object) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


def _write(files: dict[str, bytes], differing: list[tuple[str, str]], folder: Path) -> None:
    try:
        for name, problem in differing:
            path = folder / name
            if problem == "left over":
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            jsonio.write_bytes_atomic(path, files[name])
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error.strerror}. Choose another folder.") from None


if __name__ == "__main__":
    run_command(main)
