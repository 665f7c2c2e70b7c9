"""Reading single files of a run folder into cells; every problem is noted once, with its place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexttransformer.audit import reader
from nexttransformer.audit.cell import Cell, Value
from nexttransformer.audit.folder import Entry
from nexttransformer.training.strict_record import RecordType


class RunFiles:
    """Entries of a run folder and the problems found while reading them.

    Attributes:
        root: the folder.
        entries: relative path -> entry.
        problems: (where, message) of everything that is malformed, for L4.
    """

    def __init__(self, root: Path, entries: dict[str, Entry]) -> None:
        self.root, self.entries = root, entries
        self.problems: list[tuple[str, str]] = []

    def report(self, where: str, message: str) -> None:
        """Notes a malformed value."""
        self.problems.append((where, message))

    def is_file(self, name: str) -> bool:
        """Says whether a regular file of that name is there."""
        return name in self.entries and self.entries[name].kind == "file"

    def load(self, name: str, read: Callable[[Path], Value]) -> Cell[Value]:
        """Reads a file with a function that may raise Malformed."""
        if not self.is_file(name):
            return Cell(name, None, "L1")
        try:
            return Cell(name, read(self.root / name))
        except reader.Malformed as problem:
            self.report(name, f"The file {problem}")
        except Exception as problem:  # noqa: BLE001 - whatever a hostile file provokes is a finding about that file
            self.report(name, f"The file cannot be interpreted ({type(problem).__name__}).")
        return Cell(name, None, "L4")

    def json(self, name: str) -> Cell[Any]:
        """Reads any JSON value."""
        return self.load(name, lambda path: reader.parse_json(reader.read_bytes(path)))

    def record(self, name: str, schema: type[RecordType]) -> Cell[RecordType]:
        """Reads a JSON file of a schema; all its problems are noted."""
        content = self.json(name)
        if content.reported_by:
            return Cell(name, None, content.reported_by)
        return self.load(name, lambda _: self._check(name, content.value, schema))

    def _check(self, name: str, value: Any, schema: type[RecordType]) -> RecordType:
        record, problems = schema.problems_of(value, "")
        for problem in problems[:-1]:
            self.report(name, problem.removeprefix(": "))
        if problems:
            raise _SchemaProblem(problems[-1].removeprefix(": "))
        assert isinstance(record, schema)
        return record


class _SchemaProblem(reader.Malformed):
    """The last problem of a file, reported by `load`."""
