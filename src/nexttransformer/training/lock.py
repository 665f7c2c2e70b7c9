"""`train.lock`: one launch per run folder, without clocks shared between hosts and without flock.

The holder keeps its file open and rewrites the counter in place: once another launch has renamed
the file away, a revived holder writes only into what was its own.
"""

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, RunFailure
from nexttransformer.training.lock_file import LockContent, host_hash, process_start, read_lock

BEAT_SECONDS = 15.0
WATCH_SECONDS = 60.0


class LockHeld(CheckpointError):
    """Another launch is running on this folder (exit 2)."""


class LockLost(RunFailure):
    """The lock is no longer ours: nothing more may be written (exit 1)."""


class RunLock:
    """Held by rank 0. A daemon thread rewrites the counter. Use `acquire`, `check` before writing, `release`."""

    def __init__(self, path: Path, content: LockContent, descriptor: int) -> None:
        """Use `acquire`."""
        self._path = path
        self._content = content
        self._descriptor = descriptor
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="train.lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        path: Path,
        *,
        attempt: int,
        beat_seconds: float = BEAT_SECONDS,
        watch_seconds: float = WATCH_SECONDS,
    ) -> "RunLock":
        """Creates the lock (and its folder), taking over a dead one.

        Same host and process gone: taken over at once. Else watched for `watch_seconds`: a counter that
        stands still is taken over.

        Raises:
            LockHeld: the counter moves, or another launch won; names age and host hash.
            CheckpointError: the folder cannot be written.
        """
        content = LockContent(
            token=secrets.token_hex(16),
            host=host_hash(),
            process_id=os.getpid(),
            process_start=process_start(os.getpid()) or 0,
            attempt=attempt,
            counter=0,
            beat_seconds=beat_seconds,
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _create(path, content)
            if descriptor is None:
                _take_over(path, content, watch_seconds)
                descriptor = _create(path, content)
                if descriptor is not None and not _is_settled(path, content, watch_seconds):
                    os.close(descriptor)
                    descriptor = None
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be written: {problem.strerror}. Use another --output.") from None
        if descriptor is None:
            raise _held(path, read_lock(path), "was just taken by another launch")
        return cls(path, content, descriptor)

    def check(self) -> None:
        """Re-reads the token; raises LockLost if it is not ours. Call before every save and removal."""
        found = read_lock(self._path)
        if found is None or found.token != self._content.token:
            owner = f"belongs to another launch (host {found.host})" if found else "is gone"
            raise LockLost(
                f"{self._path} {owner}: this launch may not write any more and ends. If no other launch is running, "
                "repeat the command."
            )

    def release(self) -> None:
        """Ends the thread and removes the lock if it is still ours; again is harmless."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        os.close(self._descriptor)
        found = read_lock(self._path)
        if found is not None and found.token == self._content.token:
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        counter = 0
        while not self._end.wait(self._content.beat_seconds):
            counter += 1
            values = {**self._content.__dict__, "counter": counter}
            try:
                os.pwrite(self._descriptor, LockContent(**values).to_bytes(), 0)
                os.fsync(self._descriptor)
            except OSError as problem:
                # A full disk may pass; a lost file shows at the next check.
                print(f"{self._path}: the counter cannot be rewritten: {problem.strerror}.", flush=True)


def _create(path: Path, content: LockContent) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    os.pwrite(descriptor, content.to_bytes(), 0)
    os.fsync(descriptor)
    jsonio.fsync_folder(path.parent)
    return descriptor


def _take_over(path: Path, own: LockContent, watch_seconds: float) -> None:
    """Removes a dead lock; returns if the name is free, raises LockHeld if the holder lives."""
    own_host = own.host
    first = read_lock(path)
    if first is None or not _is_gone(first, own_host):
        limit = time.monotonic() + watch_seconds
        while time.monotonic() < limit:
            time.sleep(min(0.5, watch_seconds / 20))
            now = read_lock(path)
            if not path.exists():
                return
            if first is None:
                first = now
            elif now is not None and now != first:
                raise _held(path, now, "is held by a running launch")
            if first is not None and _is_gone(first, own_host):
                break
    now = read_lock(path)
    if not path.exists():
        return
    if now != first:
        raise _held(path, now, "was just taken by another launch")
    # A rename has one winner. The name is our own, so that contenders cannot touch what another one moved.
    stale = path.with_name(f"{path.name}.stale.{own.token[:8]}")
    try:
        os.rename(path, stale)
    except FileNotFoundError:
        return
    moved = read_lock(stale)
    is_fresh = moved is not None and moved != first
    if is_fresh:
        # Another launch was faster and this is its lock: give it back (a hard link never overwrites).
        with contextlib.suppress(FileExistsError):
            os.link(stale, path)
    stale.unlink(missing_ok=True)
    if is_fresh:
        raise _held(path, moved, "was just taken by another launch")


def _is_settled(path: Path, own: LockContent, watch_seconds: float) -> bool:
    """Says, after a moment, whether a lock made in a takeover is still there.

    A contender that judged the dead lock at the same time may have moved ours away; it gives it back,
    unless a third launch was faster. Then the lock is that launch's.
    """
    time.sleep(watch_seconds / 30)
    found = read_lock(path)
    return found is not None and found.token == own.token


def _is_gone(content: LockContent, own_host: str) -> bool:
    if content.host != own_host:
        return False
    start = process_start(content.process_id)
    return start is None or (content.process_start != 0 and start not in (0, content.process_start))


def _held(path: Path, content: LockContent | None, what: str) -> LockHeld:
    if content is None:
        return LockHeld(f"{path} {what}. Wait for it or use another --output.")
    age = content.counter * content.beat_seconds
    return LockHeld(
        f"{path} {what}: process {content.process_id} on host {content.host}, attempt {content.attempt}, about "
        f"{age:.0f} seconds old. Stop that launch (touch {path.with_name('stop_requested')}) or use another --output."
    )
