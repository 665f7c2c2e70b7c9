"""JSON Schemas of the three files of a submission, generated from the models that check them.

`python -m nexttransformer.export.schemas` writes them; a test compares. A change is a change of the rules.
"""

import sys
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.audit.report import AuditRecord
from nexttransformer.export.record import Record
from nexttransformer.export.submission_file import Submission
from nexttransformer.training.strict_record import StrictRecord

FOLDER = Path(__file__).parent.parent / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
MODELS: dict[str, type[StrictRecord]] = {"record": Record, "audit": AuditRecord, "submission": Submission}


def json_schema(model: type[StrictRecord]) -> dict[str, Any]:
    """Returns the JSON Schema of a file, with its `schema` key."""
    value = model.model_json_schema(by_alias=True, mode="validation")
    value["properties"] = {"schema": {"const": model.SCHEMA}, **value["properties"]}
    value["required"] = ["schema", *value.get("required", [])]
    return {"$schema": _DIALECT, "$id": model.SCHEMA, **value}


def schema_files() -> dict[str, bytes]:
    """Returns file name -> content."""
    return {f"{name}.schema.json": jsonio.pretty_bytes(json_schema(model)) for name, model in MODELS.items()}


def main() -> int:
    """Writes the files."""
    for name, content in schema_files().items():
        jsonio.write_bytes_atomic(FOLDER / name, content)
        print(f"Written: schemas/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
