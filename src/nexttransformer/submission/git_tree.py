"""What two commits of a repository hold, read from git's objects: no link is followed and no file of them is run."""

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import ConfigError

_SECONDS = 120
_REGULAR_MODES = ("100644", "100755")
_SHA1_CHARACTERS = 40


@dataclass(frozen=True)
class Entry:
    """A file of a commit; `is_regular` is false for links and submodules."""

    path: str
    object_id: str
    is_regular: bool
    num_bytes: int


class GitRepository:
    """A repository and the git program."""

    def __init__(self, folder: Path) -> None:
        """Finds the repository that holds a folder.

        Raises:
            ConfigError: there is none, or git is missing.
        """
        self.root = folder
        self.root = Path(self._text("rev-parse", "--show-toplevel").strip())

    def resolve(self, revision: str) -> str:
        """Returns the commit that a revision names; ConfigError if there is none."""
        return self._text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()

    def has(self, revision: str) -> bool:
        """Says whether a revision names a commit."""
        return self._run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")[0] == 0

    def merge_base(self, first: str, second: str) -> str:
        """Returns the best common ancestor of two commits; ConfigError if there is none."""
        return self._text("merge-base", first, second).strip()

    def tree(self, commit: str) -> dict[str, Entry]:
        """Returns path -> entry of all files of a commit."""
        entries = {}
        for line in self._bytes("ls-tree", "-r", "-z", "-l", "--full-tree", commit).split(b"\0"):
            if line:
                facts, _, name = line.partition(b"\t")
                mode, kind, object_id, size = facts.decode("ascii").split()
                path = name.decode("utf-8", "backslashreplace")
                is_regular = kind == "blob" and mode in _REGULAR_MODES
                entries[path] = Entry(path, object_id, is_regular, int(size) if size.isdigit() else 0)
        return entries

    def content(self, entry: Entry) -> bytes:
        """Returns a file's content."""
        return self._bytes("cat-file", "blob", entry.object_id)

    def is_content(self, entry: Entry, content: bytes) -> bool:
        """Says whether a file has this content."""
        if entry.num_bytes != len(content):
            return False
        if len(entry.object_id) != _SHA1_CHARACTERS:
            return self.content(entry) == content
        name = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        return name.hexdigest() == entry.object_id

    def uncommitted(self, *paths: str) -> list[str]:
        """Returns files below these paths that differ from HEAD in the work tree or index."""
        found = self._text("status", "--porcelain", "-z", "--untracked-files=all", "--", *paths).split("\0")
        return sorted(line[3:] for line in found if line)

    def _text(self, *arguments: str) -> str:
        return self._bytes(*arguments).decode("utf-8", "backslashreplace")

    def _bytes(self, *arguments: str) -> bytes:
        code, output, problem = self._run(*arguments)
        if code != 0:
            reason = problem.strip().splitlines()[-1] if problem.strip() else f"exit code {code}"
            raise ConfigError(f"{self.root}: git {' '.join(arguments)}: {reason}. Run it in a clone with full history.")
        return output

    def _run(self, *arguments: str) -> tuple[int, bytes, str]:
        environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
        command = ["git", "-c", "core.quotePath=false", "-C", str(self.root), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, timeout=_SECONDS, env=environment)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise ConfigError(f"{self.root}: git cannot be run: {problem}.") from None
        return result.returncode, result.stdout, result.stderr.decode("utf-8", "replace")
