"""What `train.lock` says, and how to tell whether the process it names is still there."""

import hashlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import NextTransformerError

# The content is padded to this, so that a rewrite never changes the length.
_CONTENT_BYTES = 512


@dataclass(frozen=True)
class LockContent:
    """What the file says. `process_start` tells a process from a later one with the same id (0: unknown)."""

    token: str
    host: str
    process_id: int
    process_start: int
    attempt: int
    counter: int
    beat_seconds: float

    def to_bytes(self) -> bytes:
        """Returns the padded file content."""
        return json.dumps(self.__dict__).encode().ljust(_CONTENT_BYTES - 1) + b"\n"


def host_hash() -> str:
    """Returns 16 hex digits for this machine, boot and process namespace: equal where process ids can be compared."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            # Not Linux: the host name alone.
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def process_start(process_id: int) -> int | None:
    """Returns the start time (clock ticks) of a process, 0 where the system does not tell, None if it is gone."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    fields = text.rpartition(")")[2].split()
    # A zombie holds nothing any more. Fields are counted from the state, the third.
    return None if fields[0] == "Z" else int(fields[19])


def read_lock(path: Path) -> LockContent | None:
    """Reads a lock; None where there is none or it is not (yet) readable."""
    try:
        value = jsonio.parse_json(path.read_bytes(), str(path))
        return LockContent(**value)
    except (OSError, TypeError, NextTransformerError):
        return None
