"""Which code is running: digests of the package's files, the git commit, and the install stamp.

Where no `.git` is at hand (container, copied tree, wheel) commit and cleanness come from the stamp
that `launch/install.sh` writes into the package folder; files that differ from the stamp count as dirty.
Method configurations are not part of the source digest: a run records the digest of its own config.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nexttransformer import __version__, jsonio
from nexttransformer.errors import ConfigError, run_command

PACKAGE = Path(__file__).resolve().parent
STAMP_NAME = ".install_stamp.json"
STAMP_SCHEMA = "nexttransformer.install_stamp/1"
_GIT_SECONDS = 30


@dataclass(frozen=True)
class CodeIdentity:
    """The code part of `run.json`.

    Attributes:
        package_version: version of the package.
        commit: 40 hex digits, or None where neither git nor a stamp tells.
        is_clean: True only if the code files are known to equal that commit.
        source_digest: see `source_digest`.
        dirty_files: changed or untracked code files, relative to the repository; empty if unknown.
    """

    package_version: str
    commit: str | None
    is_clean: bool
    source_digest: str
    dirty_files: tuple[str, ...] = ()


def package_files(package: Path = PACKAGE) -> dict[str, str]:
    """Returns path relative to the package -> SHA-256 of every file of the package, sorted by path.

    Caches, hidden files and the packaged copy of `configs/` are left out, so that a source tree and
    a wheel built from it give the same list.
    """
    files: dict[str, str] = {}
    for folder, folders, names in os.walk(package):
        inside = Path(folder).relative_to(package)
        hidden = {name for name in folders if name.startswith(".") or name == "__pycache__"}
        packaged = {"configs"} if inside == Path() else set()
        folders[:] = [name for name in folders if name not in hidden | packaged]
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                files[(inside / name).as_posix()] = jsonio.file_digest(Path(folder) / name)
    return dict(sorted(files.items()))


def source_digest(files: dict[str, str] | None = None) -> str:
    """Returns the SHA-256 over the sorted list of [path, SHA-256] of the package's files.

    Args:
        files: result of `package_files`; None reads them now.
    """
    return jsonio.digest(sorted((package_files() if files is None else files).items()))


def parts_digest(paths: Iterable[Path]) -> str:
    """Returns the SHA-256 over the sorted list of [path relative to the package, SHA-256] of some of its files.

    Raises:
        ValueError: if a path lies outside the package.
    """
    resolved = {path.resolve() for path in paths}
    return jsonio.digest(sorted((path.relative_to(PACKAGE).as_posix(), jsonio.file_digest(path)) for path in resolved))


def repository(package: Path = PACKAGE) -> Path | None:
    """Returns the root of the git work tree that holds the package as `src/nexttransformer`, else None."""
    root = package.parents[1]
    return root if package.parent.name == "src" and (root / ".git").exists() else None


def code_identity(config: Path | None = None, *, package: Path = PACKAGE) -> CodeIdentity:
    """Returns what is known about the running code.

    Args:
        config: the method configuration in use; if it lies in the repository it must be clean too.
        package: the package folder, other than this one only in tests.

    Raises:
        ConfigError: if the install stamp is needed and damaged.
    """
    digest = source_digest(package_files(package))
    root = repository(package)
    commit = _git(root, "rev-parse", "HEAD") if root else None
    if root is None or commit is None:
        return _identity_from_stamp(package, digest)
    paths = ["src", "pyproject.toml"]
    if config is not None and config.resolve().is_relative_to(root):
        paths.append(config.resolve().relative_to(root).as_posix())
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *paths)
    # A status that cannot be read is not a clean one.
    dirty = tuple(line[3:] for line in status.splitlines()) if status is not None else ("(git status failed)",)
    return CodeIdentity(__version__, commit.strip(), not dirty, digest, dirty)


def write_stamp(*, package: Path = PACKAGE) -> CodeIdentity:
    """Writes the install stamp if git is at hand; otherwise keeps the stamp that came with the files.

    Returns:
        The identity that a run would record now.
    """
    identity = code_identity(package=package)
    root = repository(package)
    if root is not None and _git(root, "rev-parse", "HEAD") is not None:
        stamp = {"commit": identity.commit, "clean": identity.is_clean, "source_digest": identity.source_digest}
        jsonio.write_json_atomic(package / STAMP_NAME, {"schema": STAMP_SCHEMA, **stamp})
    return identity


def _identity_from_stamp(package: Path, digest: str) -> CodeIdentity:
    path = package / STAMP_NAME
    if not path.exists():
        return CodeIdentity(__version__, None, False, digest)
    stamp = _read_stamp(path)
    is_clean = stamp["clean"] and stamp["source_digest"] == digest
    return CodeIdentity(__version__, stamp["commit"], is_clean, digest)


def _read_stamp(path: Path) -> dict[str, Any]:
    stamp = jsonio.read_json(path)
    expected = {"schema": str, "commit": str, "clean": bool, "source_digest": str}
    is_whole = isinstance(stamp, dict) and stamp.keys() == expected.keys()
    if not is_whole or any(not isinstance(stamp[key], kind) for key, kind in expected.items()):
        raise ConfigError(
            f"{path}: damaged install stamp: expected the keys {', '.join(expected)}. Run launch/install.sh."
        )
    if stamp["schema"] != STAMP_SCHEMA:
        raise ConfigError(f"{path}: 'schema' is '{stamp['schema']}', expected '{STAMP_SCHEMA}'. Run launch/install.sh.")
    return stamp


def _git(root: Path, *arguments: str) -> str | None:
    """Returns git's output, or None where git is missing, refuses or has no commit."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.quotePath=false", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def main(argv: list[str] | None = None) -> int:
    """Prints the code identity as JSON; `--write-stamp` also writes the install stamp."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments not in ([], ["--write-stamp"]):
        raise ConfigError(f"provenance: unknown arguments {arguments}: expected nothing or --write-stamp.")
    identity = write_stamp() if arguments else code_identity()
    print(jsonio.canonical_bytes(asdict(identity)).decode("utf-8"))
    return 0


if __name__ == "__main__":
    run_command(main)
