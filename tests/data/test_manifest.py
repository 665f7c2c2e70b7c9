"""The manifest: strict, self-consistent, bound to the protocol's data constants."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import jsonio
from nexttransformer.data.manifest import FILE_NAME, check_protocol, load_manifest
from nexttransformer.errors import DataError
from nexttransformer.protocol import get_protocol


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], None], *, is_resealed: bool) -> Path:
    value = json.loads((source / FILE_NAME).read_text("utf-8"))
    change(value)
    if is_resealed:
        value["digest"] = jsonio.digest({key: item for key, item in value.items() if key != "digest"})
    (target / FILE_NAME).write_text(json.dumps(value))
    return target


def test_digest_is_over_the_content(prepared_test_v1: Path) -> None:
    manifest = load_manifest(prepared_test_v1)
    value = manifest.to_dict()
    assert value == json.loads((prepared_test_v1 / FILE_NAME).read_text("utf-8"))
    assert manifest.digest == jsonio.digest({key: value[key] for key in value if key != "digest"})


def test_nothing_local_is_inside(prepared_test_v1: Path) -> None:
    text = (prepared_test_v1 / FILE_NAME).read_text("utf-8")
    assert "/" not in text.replace("nexttransformer.data_manifest/1", "")


@pytest.mark.parametrize(
    ("change", "is_resealed", "message"),
    [
        (lambda value: value["splits"]["train"].update(rows=161), True, "splits.train.rows is 161"),
        (lambda value: value["splits"]["train"].update(rows=161), False, "edited or damaged"),
        (lambda value: value["splits"]["val_curve"].update(digest="0" * 64), True, "splits.val_curve.digest"),
        (lambda value: value["splits"].pop("val_final"), True, "splits are"),
        (lambda value: value["splits"]["train"]["documents"][0].update(shard=9), True, "not listed"),
        (lambda value: value.update(extra=1), True, "extra: "),
        (lambda value: value.pop("shards"), True, "shards: "),
        (lambda value: value["splits"]["train"].update(bytes="7"), True, "splits.train.bytes: "),
        (lambda value: value.update(tokenizer_digest="ABC"), True, "tokenizer_digest: "),
    ],
)
def test_wrong_manifests_are_refused(
    prepared_test_v1: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], is_resealed: bool, message: str
) -> None:
    folder = edited(prepared_test_v1, tmp_path, change, is_resealed=is_resealed)
    with pytest.raises(DataError, match="manifest.json") as error:
        load_manifest(folder)
    assert message in str(error.value)


def test_all_problems_of_a_manifest_are_named(prepared_test_v1: Path, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["extra"] = 1
        value["is_repeated"] = "no"

    with pytest.raises(DataError) as error:
        load_manifest(edited(prepared_test_v1, tmp_path, change, is_resealed=True))
    assert len(str(error.value).splitlines()) == 2


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prepared data .*prepare_data"):
        load_manifest(tmp_path)


def test_other_constants_are_each_named(prepared_test_v1: Path) -> None:
    manifest = load_manifest(prepared_test_v1)
    protocol = get_protocol("test-v1")
    check_protocol(manifest, protocol, folder=prepared_test_v1)
    # A constant that prepared data does not depend on does not matter here.
    check_protocol(manifest, dataclasses.replace(protocol, bpb_final_tolerance=0.9), folder=prepared_test_v1)
    with pytest.raises(DataError) as error:
        changed = dataclasses.replace(protocol, context_tokens=64, global_batch_rows=4)
        check_protocol(manifest, changed, folder=prepared_test_v1)
    assert "context_tokens is 128: expected 64" in str(error.value)
    assert "global_batch_rows is 8: expected 4" in str(error.value)
    with pytest.raises(DataError, match="prepared for test-v1: expected demo-v1"):
        check_protocol(manifest, get_protocol("demo-v1"), folder=prepared_test_v1)
