"""Where compiled code is kept: on the node's own disk, one folder per job and local rank, started with a copy.

Concurrent processes that share one cache have corrupted it (triton#2688, pytorch#134384), and network file
systems are slow and break its renames. A new job would therefore compile everything again; it begins with a
copy of what the last job on this node compiled. The entries are named by what they were compiled from, so an
old one can be useless, never wrong. Jobs without a number of their own (two runs started by hand on the GPUs of
one machine) are told apart by a lock: the second takes a folder of its own.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from nexttransformer.training.distributed import World

_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_NETWORK_TYPES = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs\w*|ceph|cifs|smb\w*|afs|pvfs2|orangefs|panfs|wekafs|glusterfs|fuse\.(?!fuse-overlayfs|ext|ntfs).*"
)
# Written into a rank's folder once everything is compiled; only such folders are copied.
_MARKER = ".warm"
_DEFAULT_JOB = "local"
_KEPT_SECONDS = 30 * 24 * 3600
# Folders this process uses -> its hold on them, which ends with the process.
_held: dict[Path, int] = {}


def set_cache_folders(cache_root: Path, world: World) -> list[str]:
    """Points torch and Triton to this rank's folders; returns what should be said about it, one line each."""
    warnings = []
    job = os.environ.get("SLURM_JOB_ID", _DEFAULT_JOB)
    for variable, name in _VARIABLES.items():
        root = Path(os.environ.get(variable) or cache_root / name)
        own = root / job / f"rank_{world.local_rank}"
        if world.device.type == "cuda":
            kind = file_system(root)
            local = Path(tempfile.gettempdir()) / f"nexttransformer_{os.getuid()}" / name
            if _NETWORK_TYPES.fullmatch(kind):
                warnings.append(f"{root} is on a network file system ({kind}); compiled code goes to {local} instead.")
                root = local
            try:
                own = _claim(root, job, own.name)
            except OSError as error:
                # Another user's, or read-only: torch would fail with it while it compiles.
                warnings.append(f"{root} cannot be used ({error.strerror}); compiled code goes to {local} instead.")
                root, own = local, _claim(local, job, own.name)
            try:
                _remove_old(root, own.parent.name)
                _warm_up(root, own)
            except OSError as error:
                reason = error.strerror or "the last job's could not be copied"
                warnings.append(f"{own}: starts empty, compiling takes longer: {reason}.")
        os.environ[variable] = str(own)
    return warnings


def mark_warm() -> None:
    """Notes that this rank has compiled everything, so that later jobs on this node may copy it."""
    for variable in _VARIABLES:
        folder = Path(os.environ.get(variable, ""))
        if folder.is_absolute() and folder.is_dir():
            (folder / _MARKER).touch()


def file_system(path: Path, mounts: str | None = None) -> str:
    """Returns the type of the file system that holds a path (or will): the last column but three of /proc/mounts."""
    if mounts is None:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    resolved = path.resolve()
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, point, found = line.split()[:3]
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code.group(1), 8)), point))
        # Of several on one point the last is the one that is seen.
        if resolved.is_relative_to(place) and len(place.parts) >= best:
            best, kind = len(place.parts), found
    return kind


def _claim(root: Path, job: str, name: str) -> Path:
    """Returns the first of root/job/name, root/job-2/name, ... that no other living process uses, and holds it."""
    number = 1
    while True:
        folder = root / (job if number == 1 else f"{job}-{number}") / name
        if folder in _held:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        hold = os.open(folder.with_name(f".{name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(hold)
            number += 1
            continue
        _held[folder] = hold
        return folder


def _warm_up(root: Path, own: Path) -> None:
    """Fills a new folder with a copy of the newest complete one of the same local rank."""
    if own.exists():
        return
    markers = [path / own.name / _MARKER for path in root.iterdir()] if root.is_dir() else []
    markers = sorted((path for path in markers if path.is_file()), key=lambda path: path.stat().st_mtime)
    if not markers:
        return
    # This process holds the folder: what is there was left by one that was killed.
    partial = own.with_name(f"{own.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(markers[-1].parent, partial, ignore=shutil.ignore_patterns(_MARKER))
    partial.rename(own)


def _remove_old(root: Path, job: str) -> None:
    """Removes the folders of other jobs that nobody has completed anything in for a month."""
    limit = time.time() - _KEPT_SECONDS
    for folder in root.iterdir() if root.is_dir() else []:
        if folder.name not in (job, _DEFAULT_JOB) and folder.is_dir():
            newest = max(path.stat().st_mtime for path in (folder, *folder.glob(f"*/{_MARKER}")))
            if newest < limit:
                shutil.rmtree(folder, ignore_errors=True)
