"""A value of the run folder that may be missing or unreadable, with the place where that is reported."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from nexttransformer.audit.check import Finding, Needs, unjudged

Value = TypeVar("Value")


@dataclass(frozen=True)
class Cell(Generic[Value]):
    """A value, or why there is none. `reported_by` is the rule that reports it."""

    where: str
    value: Value | None
    reported_by: str = ""

    def get(self) -> Value:
        """Returns the value; raises Needs with a pointer where there is none."""
        if self.value is None:
            raise Needs(f"Needs {self.where}, which cannot be used; see {self.reported_by}.", self.where)
        return self.value


def readable(cells: Mapping[str, Cell[Value]]) -> tuple[dict[str, Value], list[Finding]]:
    """Returns the values that are there, and an `unjudged` finding for each unusable one."""
    values = {name: cell.value for name, cell in cells.items() if cell.value is not None}
    return values, [
        unjudged(f"Needs {cell.where}, which cannot be used; see {cell.reported_by}.", cell.where)
        for cell in cells.values()
        if cell.value is None
    ]


def guarded(steps: Mapping[str, Callable[[], Iterator[Finding]]]) -> Iterator[Finding]:
    """Runs independent parts of a check: a part that lacks its input becomes `unjudged`, the others go on."""
    for step in steps.values():
        try:
            yield from step()
        except Needs as missing:
            yield unjudged(str(missing), missing.where)
