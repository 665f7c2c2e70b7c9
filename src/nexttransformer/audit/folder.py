"""What lies in a run folder, without following links, and what should."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nexttransformer.protocol import Protocol
from nexttransformer.training import checkpoint_files

Kind = Literal["file", "folder", "link", "other"]

MAX_ENTRIES = 20_000
RUN_FILES = ("run.json", "run_state.json", "events.jsonl", "metrics.jsonl")
LOCK_FILE = "train.lock"
FINAL_FILE = "evaluations/final.json"
CHECKPOINT_NAME = re.compile(r"checkpoint_(\d{8})")
_OPENED = re.compile(r"evaluations|checkpoint_\d{8}")
# Launcher output and what users may put beside a run; not looked into.
_ALLOWED_FOLDERS = re.compile(r"logs|export")
_ALLOWED_FILES = re.compile(
    r"train\.lock|stop_requested|kernel_tuning\.json|evaluation[A-Za-z0-9._-]*\.json|report\.html"
)
_OPTIMIZER_FILE = re.compile(r"optimizer_\d{5}_of_\d{5}\.safetensors")
SAFE_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Entry:
    """One name in the folder; `num_bytes` of a file."""

    kind: Kind
    num_bytes: int


def list_entries(root: Path) -> dict[str, Entry]:
    """Returns relative path -> entry of the run folder, its `evaluations/` and its checkpoints, sorted by path.

    Raises:
        OSError: the folder cannot be read, or holds more than any run writes.
    """
    entries: dict[str, Entry] = {}
    for folder in (root, *(root / name for name in sorted(os.listdir(root)) if _OPENED.fullmatch(name))):
        if folder != root and entries[folder.name].kind != "folder":
            continue
        with os.scandir(folder) as found:
            for item in found:
                name = item.name if folder == root else f"{folder.name}/{item.name}"
                entries[name] = _entry(item)
                if len(entries) > MAX_ENTRIES:
                    raise OSError(0, f"more than {MAX_ENTRIES:,} files")
    return dict(sorted(entries.items()))


def _entry(item: os.DirEntry) -> Entry:
    status = item.stat(follow_symlinks=False)
    kind: Kind = "other"
    if stat.S_ISLNK(status.st_mode):
        kind = "link"
    elif stat.S_ISDIR(status.st_mode):
        kind = "folder"
    elif stat.S_ISREG(status.st_mode):
        kind = "file"
    return Entry(kind, status.st_size)


def expected_evaluations(protocol: Protocol) -> list[str]:
    """Returns the evaluation files of a complete run, relative to its folder."""
    curve = [f"evaluations/val_curve_{update:08d}.json" for update in protocol.bpb_updates()]
    core = [f"evaluations/core_{update:08d}.json" for update in protocol.core_updates()]
    return [*curve, *core, FINAL_FILE]


def expected_entries(protocol: Protocol) -> dict[str, Kind]:
    """Returns what a complete run holds: relative path -> kind. What is in the final checkpoint, K1 knows."""
    final = checkpoint_files.checkpoint_name(protocol.num_updates)
    expected: dict[str, Kind] = {"evaluations": "folder", final: "folder"}
    for name in (*RUN_FILES, *expected_evaluations(protocol)):
        expected[name] = "file"
    return expected


def is_allowed(name: str, kind: Kind) -> bool:
    """Says whether an entry that no run needs may be there without remark."""
    parent, _, own = name.rpartition("/")
    if CHECKPOINT_NAME.fullmatch(parent):
        known = own in (checkpoint_files.MARKER_FILE, checkpoint_files.MODEL_FILE, *checkpoint_files.JSON_FILES)
        return kind == "file" and (known or _OPTIMIZER_FILE.fullmatch(own) is not None)
    if parent:
        return False
    if kind == "folder":
        return _ALLOWED_FOLDERS.fullmatch(own) is not None or CHECKPOINT_NAME.fullmatch(own) is not None
    return kind == "file" and _ALLOWED_FILES.fullmatch(own) is not None
