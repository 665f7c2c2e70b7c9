"""The CORE bundle: 22 task descriptions and their rows, read from a folder or an archive and verified by hash."""

import gzip
import hashlib
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nexttransformer import jsonio, protocol
from nexttransformer.errors import DataError, join_problems

MULTIPLE_CHOICE = "multiple_choice"
SCHEMA = "schema"
LANGUAGE_MODELING = "language_modeling"

TASKS_FILE = "tasks.json"
ARCHIVE_SUFFIXES = (".zip", ".tar.gz", ".tgz")
EXCERPT_FOLDER = Path(__file__).parent.parent / "resources" / "core_excerpt"

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One of the 22 tasks. Baselines are in percent; `delimiter` stands between question and answer."""

    label: str
    kind: str
    file: str
    num_fewshot: int
    delimiter: str
    baseline_v1: float
    baseline_v2: float
    num_rows: int


@dataclass(frozen=True)
class Bundle:
    """Verified tasks and rows.

    Attributes:
        digest: SHA-256 of `tasks.json`, which names the hash of every data file.
        is_excerpt: whether these are only some rows of CORE, so that no CORE value may come from them.
        tasks: in the order of `tasks.json`.
        rows: data file name -> rows in file order; nothing is stripped, sorted or rewritten.
    """

    digest: str
    is_excerpt: bool
    tasks: tuple[Task, ...]
    rows: dict[str, list[Row]]


def load_bundle(path: Path, digest: str) -> Bundle:
    """Reads and verifies a CORE bundle.

    Args:
        path: a folder, or an archive (.zip, .tar.gz, .tgz) that holds one `tasks.json` and the data files beside it.
        digest: expected SHA-256 of `tasks.json`.

    Raises:
        DataError: if `tasks.json` or any data file is missing or differs; every problem is named.
    """
    read = _open_source(path)
    content = read(TASKS_FILE)
    if content is None:
        raise DataError(
            f"{path}: no {TASKS_FILE}, so this is no CORE bundle. Name its folder or archive in 'core_bundle'."
        )
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise DataError(
            f"{path}: {TASKS_FILE} has SHA-256 {found}, expected {digest}. This is another CORE bundle; use the one "
            "that the protocol names."
        )
    listing = jsonio.parse_json(content, f"{path}: {TASKS_FILE}", DataError)
    rows, problems = {}, []
    for name, facts in listing["files"].items():
        try:
            rows[facts["file"]] = _read_rows(read(facts["file"]), facts)
        except DataError as problem:
            problems.append(f"{path}: {facts['file']} ({name}): {problem}")
    if problems:
        raise DataError(join_problems(problems))
    tasks = tuple(
        Task(
            label=entry["label"],
            kind=entry["icl_task_type"],
            file=entry["file"],
            num_fewshot=entry["num_fewshot"],
            delimiter=entry["continuation_delimiter"],
            baseline_v1=entry["random_baseline"],
            baseline_v2=entry["random_baseline_v2"],
            num_rows=entry["rows"],
        )
        for entry in listing["tasks"]
    )
    is_excerpt = digest != protocol.BUNDLE_TASKS_DIGESTS[protocol.FULL_BUNDLE]
    return Bundle(digest=digest, is_excerpt=is_excerpt, tasks=tasks, rows=rows)


def _read_rows(packed: bytes | None, facts: dict[str, Any]) -> list[Row]:
    """Unpacks one data file and checks byte count, SHA-256 and row count."""
    if packed is None:
        raise DataError("missing. Restore the bundle.")
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"damaged gzip data ({problem}). Restore the file.") from None
    num_rows = content.count(b"\n")
    if num_rows != facts["rows"]:
        raise DataError(f"{num_rows} rows, expected {facts['rows']}. Restore the file.")
    if len(content) != facts["bytes"]:
        raise DataError(f"{len(content)} bytes unpacked, expected {facts['bytes']}. Restore the file.")
    found = hashlib.sha256(content).hexdigest()
    if found != facts["sha256"]:
        raise DataError(f"SHA-256 of the unpacked rows is {found}, expected {facts['sha256']}. Restore the file.")
    # Split at "\n" only: rows hold other characters that `splitlines` would cut at.
    return [json.loads(line) for line in content.decode("utf-8").split("\n")[:-1]]


def _open_source(path: Path) -> Callable[[str], bytes | None]:
    """Returns a function from file name to bytes, or None for a missing file."""
    if path.is_dir():
        return lambda name: (path / name).read_bytes() if (path / name).is_file() else None
    if not path.is_file():
        raise DataError(f"{path}: the CORE bundle is not there. Name its folder or archive in 'core_bundle'.")
    if not path.name.endswith(ARCHIVE_SUFFIXES):
        raise DataError(f"{path}: expected a folder or an archive ({', '.join(ARCHIVE_SUFFIXES)}).")
    try:
        members = _read_zip(path) if path.suffix == ".zip" else _read_tar(path)
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path}: the archive cannot be read ({problem}).") from None
    roots = [name.parent for name in members if name.name == TASKS_FILE]
    if len(roots) > 1:
        raise DataError(f"{path}: {len(roots)} files named {TASKS_FILE}, expected one.")
    root = roots[0] if roots else PurePosixPath()
    return lambda name: members.get(root / name)


def _is_wanted(name: str) -> bool:
    return name.endswith((TASKS_FILE, ".jsonl.gz"))


def _read_zip(path: Path) -> dict[PurePosixPath, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {PurePosixPath(name): archive.read(name) for name in archive.namelist() if _is_wanted(name)}


def _read_tar(path: Path) -> dict[PurePosixPath, bytes]:
    contents = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() and _is_wanted(member.name) else None
            if file is not None:
                contents[PurePosixPath(member.name)] = file.read()
    return contents
