"""The code a run is compared with: its recorded commit (formal), or the installed package (demo)."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol as Interface

from nexttransformer import provenance
from nexttransformer.audit.check import Needs
from nexttransformer.config import configs_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")
_GIT_SECONDS = 60
# Variables that would lead git to the objects of another repository.
_GIT_REDIRECTIONS = frozenset(
    "GIT_DIR GIT_WORK_TREE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE".split()
)
# Import names of the declared dependencies that model code may use (a test compares them with pyproject.toml).
DECLARED_IMPORTS = frozenset("nexttransformer torch numpy pydantic safetensors fla einops triton".split())


class CodeReference(Interface):
    """What the checks of code and configuration need."""

    @property
    def is_commit(self) -> bool:
        """Whether files are those of the recorded commit, rather than of the installed package."""
        ...

    def package_files(self, commit: str | None) -> dict[str, str]:
        """Returns path relative to the package -> SHA-256; Needs if that commit is not at hand."""
        ...

    def package_file(self, commit: str | None, path: str) -> bytes | None:
        """Returns the content of a package file, None if there is none."""
        ...

    def config(self, commit: str | None, family: str, method: str) -> bytes | None:
        """Returns the content of `configs/<family>/<method>.json`, None if there is none."""
        ...


@dataclass(frozen=True)
class InstalledCode:
    """The package that runs this audit; for the demo division."""

    package: Path = provenance.PACKAGE
    configs: Path = field(default_factory=configs_folder)
    is_commit: bool = False

    def package_files(self, commit: str | None) -> dict[str, str]:
        """Returns the digests of the installed files."""
        return provenance.package_files(self.package)

    def package_file(self, commit: str | None, path: str) -> bytes | None:
        """Returns an installed file's content."""
        file = self.package / path
        return file.read_bytes() if file.is_file() else None

    def config(self, commit: str | None, family: str, method: str) -> bytes | None:
        """Returns a shipped configuration."""
        file = self.configs / family / f"{method}.json"
        return file.read_bytes() if file.is_file() else None


@dataclass(frozen=True)
class CommitCode:
    """The commits of the repository that holds this package; None where there is no repository."""

    root: Path | None
    is_commit: bool = True

    def package_files(self, commit: str | None) -> dict[str, str]:
        """Returns the digests of the package's files at the commit."""
        prefix = "src/nexttransformer/"
        return {path[len(prefix) :]: digest for path, digest in _hashes(self._root(commit), str(commit), prefix)}

    def package_file(self, commit: str | None, path: str) -> bytes | None:
        """Returns a package file's content at the commit."""
        return self._show(commit, f"src/nexttransformer/{path}")

    def config(self, commit: str | None, family: str, method: str) -> bytes | None:
        """Returns a configuration's content at the commit."""
        return self._show(commit, f"configs/{family}/{method}.json")

    def _show(self, commit: str | None, path: str) -> bytes | None:
        return git_output(self._root(commit), "cat-file", "blob", f"{commit}:{path}")

    def _root(self, commit: str | None) -> Path:
        """Returns the repository.

        Raises:
            Needs: it is not there or does not know the commit.
        """
        if commit is None or not _COMMIT.fullmatch(commit):
            raise Needs("Needs the recorded commit, and none is recorded; see P3.", "run.json code.commit")
        if self.root is None:
            raise Needs("Needs the repository: run the audit in a git clone of the project.", "run.json code.commit")
        if git_output(self.root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
            message = f"Needs commit {commit}, which this clone does not have. Fetch it, then audit again."
            raise Needs(message, "run.json code.commit")
        return self.root


@lru_cache(maxsize=256)
def imports_outside(source: bytes) -> tuple[str, ...]:
    """Returns the packages a module imports that are neither declared nor of the standard library.

    Raises:
        SyntaxError: if the module cannot be parsed.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return tuple(sorted(names - DECLARED_IMPORTS - sys.stdlib_module_names))


@lru_cache(maxsize=8)
def _hashes(root: Path, commit: str, prefix: str) -> tuple[tuple[str, str], ...]:
    """Returns (path, SHA-256) of all files below a folder at a commit, by the rules of `provenance.package_files`."""
    listing = git_output(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", prefix) or b""
    blobs = {}
    for line in listing.split(b"\0")[:-1]:
        facts, _, path = line.partition(b"\t")
        parts = Path(path.decode("utf-8")).relative_to(prefix).parts
        is_skipped = parts[0] == "configs" or any(part.startswith(".") or part == "__pycache__" for part in parts)
        if not is_skipped and not parts[-1].endswith(".pyc"):
            blobs[path.decode("utf-8")] = facts.split()[2]
    content = git_output(root, "cat-file", "--batch", given=b"\n".join(blobs.values())) or b""
    result, position = [], 0
    for path in blobs:
        end = content.index(b"\n", position)
        num_bytes = int(content[position:end].split()[2])
        start = end + 1
        result.append((path, hashlib.sha256(content[start : start + num_bytes]).hexdigest()))
        position = start + num_bytes + 1
    return tuple(sorted(result))


def git_output(root: Path, *arguments: str, given: bytes | None = None) -> bytes | None:
    """Returns git's output in that folder's own repository, None if it refuses."""
    environment = {key: value for key, value in os.environ.items() if key not in _GIT_REDIRECTIONS}
    command = ["git", "--no-replace-objects", "-c", "core.quotePath=false", "-C", str(root), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, input=given, timeout=_GIT_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
