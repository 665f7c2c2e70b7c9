"""The schemas are frozen: changing one is changing the rules, and is said in CHANGELOG.md."""

import json

import pytest

from nexttransformer import jsonio
from nexttransformer.export.schemas import FOLDER, MODELS, json_schema, schema_files
from tests.export.exported import SUBMISSION, ExportedRun

# Of the names of all keys.
KEYS = {"record": "e9fb5f87f85d25cb", "audit": "65170403d184944b", "submission": "dadd19e096fecce1"}


def test_the_files_are_those_of_the_models() -> None:
    files = schema_files()
    assert {path.name for path in FOLDER.glob("*.json")} == files.keys()
    for name, content in files.items():
        assert (FOLDER / name).read_bytes() == content, f"{name}: python -m nexttransformer.export.schemas"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_keys_are_frozen(name: str) -> None:
    value = json_schema(MODELS[name])
    keys = {"": sorted(value["properties"])} | {
        part: sorted(entry["properties"]) for part, entry in value["$defs"].items() if "properties" in entry
    }
    assert jsonio.digest(keys)[:16] == KEYS[name]


def test_a_real_record_audit_and_submission_fit(exported: ExportedRun) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    values = {
        "record": json.loads(exported.record_path.read_text()),
        "audit": json.loads(exported.audit.read_text()),
        "submission": SUBMISSION,
    }
    for name, value in values.items():
        validator = jsonschema.Draft202012Validator(json.loads((FOLDER / f"{name}.schema.json").read_text()))
        assert list(validator.iter_errors(value)) == []
        assert list(validator.iter_errors({**value, "extra": 1})) != []
        assert list(validator.iter_errors({**value, "schema": "other"})) != []
