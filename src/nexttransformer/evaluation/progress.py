"""Progress of an evaluation for people: a bar with the time left on a terminal, a line now and then elsewhere."""

import time
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LOG_SECONDS = 30.0


class Progress:
    """Counts the work of one evaluation on rank 0 and says when a part of it (a task, a split) is complete."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        )  # fmt: skip
        self._bar = RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._line = self._bar.add_task(title, total=None)
        self._left: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()

    def start(self, total: int, rows: Iterable[str]) -> None:
        """Begins.

        Args:
            total: units of work (tokens) ahead.
            rows: for every row of this process, the name of its part.
        """
        self._total, self._done = max(total, 1), 0
        self._rows = Counter(rows)
        self._left = self._rows.copy()
        self._began = self._told = time.monotonic()
        self._bar.update(self._line, total=self._total)
        self._bar.start()

    def advance(self, units: int, rows: Iterable[str]) -> None:
        """Counts finished work and the parts its rows belong to."""
        self._done += units
        self._bar.update(self._line, completed=self._done)
        for name, num_rows in Counter(rows).items():
            self._left[name] -= num_rows
            if self._left[name] == 0:
                self._tell(f"{name}: {self._rows[name]:,} rows done")
        if not self._console.is_terminal and time.monotonic() - self._told > LOG_SECONDS:
            self._tell("")

    def stop(self) -> None:
        """Takes the bar away."""
        self._bar.stop()

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        elapsed = self._told - self._began
        left = elapsed * (self._total - self._done) / max(self._done, 1)
        share = min(100 * self._done // self._total, 100)
        line = f"{self._title} {share:3d} % | {_clock(left)} left | {text}".rstrip(" |")
        self._console.print(line, highlight=False, markup=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
