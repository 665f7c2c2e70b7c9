"""What a long preparation says: a progress bar on a terminal, a line now and then in a log."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG_EVERY_SECONDS = 10.0


class Reporter:
    """Prints lines and hands out progress bars; `is_quiet` prints nothing."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.console = Console(quiet=is_quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False)

    def bar(self, title: str, *, unit: str, total: float | None = None) -> "Bar":
        """Returns a context manager that shows how far a step is, its speed in units/s and time to go."""
        return Bar(self.console, title, unit=unit, total=total)


class Bar:
    """One step's progress."""

    def __init__(self, console: Console, title: str, *, unit: str, total: float | None) -> None:
        self._console, self._title, self._unit, self.total = console, title, unit, total
        self.completed = 0.0
        self._start = self._last_line = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "Bar":
        if self._console.is_terminal:
            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[speed]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = progress.add_task(self._title, total=self.total, speed="")
            progress.start()
            self._progress = progress
        return self

    def advance(self, amount: float, *, total: float | None = None) -> None:
        """Adds finished units; `total` corrects the expected number of units."""
        self.completed += amount
        self.total = total if total is not None else self.total
        if self._progress is not None:
            self._progress.update(self._task, completed=self.completed, total=self.total, speed=self._speed())
        elif time.monotonic() - self._last_line >= _LOG_EVERY_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(f"{self._title}: {self._numbers()}", markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if error is None:
            seconds = time.monotonic() - self._start
            self._console.print(
                f"{self._title}: {self.completed:,.0f} {self._unit}, {self._speed()}, {seconds:.1f} s", markup=False
            )

    def _speed(self) -> str:
        return f"{self.completed / max(time.monotonic() - self._start, 1e-9):,.0f} {self._unit}/s"

    def _numbers(self) -> str:
        text = f"{self.completed:,.0f} {self._unit}, {self._speed()}"
        if self.total and self.completed:
            seconds = (time.monotonic() - self._start) * max(self.total / self.completed - 1, 0)
            text += f", {100 * min(self.completed / self.total, 1):.0f} %, {seconds / 60:.1f} min to go"
        return text
