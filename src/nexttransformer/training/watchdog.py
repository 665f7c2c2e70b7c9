"""Watchdog: a dead or hanging rank ends the whole job, with stack traces and the name of rank and host.

One thread per rank. Every few seconds it writes a sign of life to the key-value store of the process
group: a counter, the update the loop has completed, and whether the loop is inside a collective. Rank 0
watches all ranks, the others watch rank 0 and a verdict that rank 0 leaves. The stall limit rests during
start, saves and evaluations, which have limits of their own.
"""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from nexttransformer.errors import EXIT_FAILED
from nexttransformer.training.distributed import KeyValueStore, World

_VERDICT = "nexttransformer/verdict"
_FAILURE = "nexttransformer/failure"
_NUM_MEDIAN_UPDATES = 101
# Where a rank is when it needs the others to go on.
REDUCING = "reducing gradients"
WAITING = "waiting for all ranks"


def _key(rank: int) -> str:
    return f"nexttransformer/life/{rank}"


def is_connection_error(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


class Watchdog:
    """Started once per attempt, after the processes met. The loop calls `completed` once per update."""

    def __init__(
        self,
        world: World,
        logs: Path,
        *,
        on_failure: Callable[[str], None],
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Nothing runs yet.

        Args:
            world: all ranks, limits and store.
            logs: folder of the stack traces.
            on_failure: rank 0's last words (event and run state); called in the watchdog's thread.
            end_process: ends this process at once; the main thread may be stuck where no exception reaches it.
        """
        self._world, self._logs = world, logs
        self._on_failure, self._end_process = on_failure, end_process
        self._update = 0
        self._place = "starting"
        self._is_resting = True
        self._seconds: deque[float] = deque(maxlen=_NUM_MEDIAN_UPDATES)
        self._last = time.monotonic()
        self._counter = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; every rank calls it at about the same time."""
        if self._world.store is not None:
            self._world.store.set_timeout(timedelta(seconds=self._world.limits.heartbeat))
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def completed(self, update: int, seconds: float) -> None:
        """Notes a completed update and how long it took."""
        self._update = update
        self._seconds.append(seconds)
        self._last = time.monotonic()

    def at(self, place: str) -> None:
        """Notes where the loop is; shown if it never leaves."""
        self._place = place

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, an update must be completed now and then; outside, only the process must live."""
        self._last = time.monotonic()
        self._is_resting = False
        try:
            yield
        finally:
            self._is_resting = True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspends `watching` for a save or an evaluation."""
        before, self._is_resting = self._is_resting, True
        try:
            yield
        finally:
            self._last = time.monotonic()
            self._is_resting = before

    def stop(self) -> None:
        """Ends the thread; a clean leave is told to rank 0."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._world.limits.beat + 1)

    def explain(self, error: BaseException) -> None:
        """Tells why this rank leaves after an error that the ranks did not agree on.

        A broken connection is a symptom: the rank that broke it is named by rank 0's watchdog, which
        also ends this process; so this waits for it. Any other error is this rank's own and is handed
        to rank 0.
        """
        if self._world.store is None:
            return
        if not is_connection_error(error):
            text = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {text[0]}"
            self._world.store.set(_FAILURE, f"Rank {self._world.rank} on {self._world.host} failed: {reason}")
        time.sleep(self._world.limits.heartbeat + 4 * self._world.limits.beat)

    @property
    def stall_seconds(self) -> float:
        """How long an update may take before it counts as hanging."""
        limit = self._world.limits.stall
        if len(self._seconds) < 2:
            # The first updates compile.
            return max(limit, self._world.limits.first_updates)
        return max(limit, 20 * statistics.median(self._seconds))

    def _run(self) -> None:
        while not self._stop.wait(self._world.limits.beat):
            problem = self._look()
            if problem is not None and not self._stop.is_set():
                self._fail(problem)
                return
        self._say("left")

    def _look(self) -> str | None:
        """Writes this rank's sign of life and returns what is wrong anywhere, else None."""
        self._counter += 1
        store = self._world.store
        try:
            self._say(f"{self._counter} {self._world.host} {self._update} {self._place}")
            if store is not None and self._world.is_main:
                if store.check([_FAILURE]):
                    return store.get(_FAILURE).decode()
                for rank in range(1, self._world.world_size):
                    if (problem := self._look_at(rank, store)) is not None:
                        return problem
            elif store is not None:
                if store.check([_VERDICT]):
                    return store.get(_VERDICT).decode()
                if (problem := self._look_at(0, store)) is not None:
                    return problem
        except (RuntimeError, OSError):
            host = self._seen[0][0].split(" ")[1] if self._seen.get(0, ("",))[0] else "an unknown host"
            return f"Rank 0 on {host} (or the launcher that keeps the key-value store) is gone."
        silent = time.monotonic() - self._last
        # Rank 0 judges for all: it knows who is behind.
        if self._world.is_main and not self._is_resting and silent > self.stall_seconds:
            return self._name_stalled(silent)
        return None

    def _say(self, text: str) -> None:
        if self._world.store is None:
            return
        try:
            self._world.store.set(_key(self._world.rank), text)
        except (RuntimeError, OSError):
            if text != "left":
                raise

    def _look_at(self, rank: int, store: KeyValueStore) -> str | None:
        now = time.monotonic()
        text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
        seen = self._seen.get(rank)
        if seen is None or seen[0] != text:
            self._seen[rank] = (text, now)
            return None
        if text == "left" or now - seen[1] < self._world.limits.heartbeat:
            return None
        _, host, update, place = (text.split(" ", 3) + ["?"] * 4)[:4] if text else ("", "unknown host", "0", "starting")
        return f"Rank {rank} on {host} is dead or frozen (last sign of life at update {update}, {place})."

    def _name_stalled(self, silent: float) -> str:
        """Names the rank that is behind: the others wait for it inside a collective."""
        store, behind = self._world.store, "All ranks wait for each other: the job"
        for rank in range(self._world.world_size):
            text = f"0 {self._world.host} {self._update} {self._place}"
            if store is not None and rank != self._world.rank:
                text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else "0 unknown 0 starting"
            _, host, update, place = (text.split(" ", 3) + ["?"] * 4)[:4]
            if place not in (REDUCING, WAITING) or update != str(self._update):
                behind = f"Rank {rank} on {host} ({place})"
                break
        return f"{behind} hangs: no update for {silent:.0f} s after update {self._update}."

    def _fail(self, problem: str) -> None:
        self._dump(problem)
        store = self._world.store
        if self._world.is_main:
            if store is not None:
                try:
                    store.set(_VERDICT, problem)
                except (RuntimeError, OSError) as error:
                    print(f"The other ranks could not be told: {error}", file=sys.stderr, flush=True)
            self._on_failure(problem)
            # Time for the others to read the verdict, dump their stacks and leave.
            time.sleep(2 * self._world.limits.beat if self._world.world_size > 1 else 0)
        print(f"failed: {problem} (said by rank {self._world.rank})", file=sys.stderr, flush=True)
        self._end_process(EXIT_FAILED)

    def _dump(self, problem: str) -> None:
        path = self._logs / f"stacks_rank_{self._world.rank:05d}.txt"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{problem}\n")
                file.write(f"rank {self._world.rank} on {self._world.host}, update {self._update}, {self._place}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            print(f"{path}: stack traces could not be written: {error}", file=sys.stderr, flush=True)
