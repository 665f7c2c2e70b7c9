"""Base class of every JSON file of a run: strict pydantic models that list all problems of a file at once."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, NextTransformerError, join_problems, suggest

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 as 64 lower-case hex digits."""
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A 64-bit number as 16 lower-case hex digits."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, from 0."""
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]
"""UTC, ISO 8601 with milliseconds."""

RecordType = TypeVar("RecordType", bound="StrictRecord")


def utc_now() -> str:
    """Returns the time as UTC ISO 8601 with milliseconds, such as `2026-01-31T12:00:00.123Z`."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class StrictPart(pydantic.BaseModel):
    """A frozen object inside a file: unknown keys are errors, integers stay integers, no NaN or Infinity."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True, protected_namespaces=()
    )


class StrictRecord(StrictPart):
    """A whole file or line. Subclasses with a `SCHEMA` write it as the key `schema` and require it."""

    SCHEMA: ClassVar[str | None] = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data, with `schema` where the file has one."""
        value = self.model_dump(by_alias=True)
        return value if self.SCHEMA is None else {"schema": self.SCHEMA, **value}

    @classmethod
    def problems_of(cls, value: Any, where: str) -> tuple["StrictRecord | None", list[str]]:
        """Checks a parsed JSON value: returns (record, []) or (None, one line per problem)."""
        if not isinstance(value, dict):
            return None, [f"{where}: expected a JSON object, got {type(value).__name__}."]
        problems = []
        content = dict(value)
        if cls.SCHEMA is not None:
            got = content.pop("schema", None)
            if got != cls.SCHEMA:
                problems.append(f"{where}: schema: expected '{cls.SCHEMA}', got {got!r}.")
        try:
            record = cls.model_validate(content)
        except pydantic.ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                place = ".".join(str(part) for part in item["loc"])
                if item["type"] == "extra_forbidden":
                    hint = suggest(place, cls.model_fields) if "." not in place else ""
                    problems.append(f"{where}: unknown key '{place}'.{hint}")
                elif item["type"] == "missing":
                    problems.append(f"{where}: key '{place}' is missing.")
                else:
                    problems.append(f"{where}: {place}: {item['msg']}, got {_short(item['input'])}.")
            return None, problems
        return (None, problems) if problems else (record, [])

    @classmethod
    def from_json(
        cls: type[RecordType], value: Any, where: str, error: type[NextTransformerError] = CheckpointError
    ) -> RecordType:
        """Checks a parsed JSON value and returns the record; raises `error` with all problems together."""
        record, problems = cls.problems_of(value, where)
        if problems:
            raise error(join_problems(problems))
        assert isinstance(record, cls)
        return record

    @classmethod
    def read(cls: type[RecordType], path: Path, error: type[NextTransformerError] = CheckpointError) -> RecordType:
        """Reads and checks a file; raises `error` naming the file and every problem in it."""
        return cls.from_json(jsonio.read_json(path, error), str(path), error)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
