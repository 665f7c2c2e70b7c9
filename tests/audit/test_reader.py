"""Hostile files: whatever they hold, the reader says what is wrong and never follows, waits or crashes."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.audit import reader


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "not finite"),
        (b'{"a": 18446744073709551616}', "64 bits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "64 bits"),
        (b'{"a": 1, "b": 2, "a": 3}', 'duplicate key "a"'),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 33 + b"]" * 33, "levels"),
        (b"[" * 100_000, "levels"),
        (b"{} {}", "not valid JSON"),
    ],
)
def test_refused_json(content: bytes, part: str) -> None:
    with pytest.raises(reader.Malformed, match=part):
        reader.parse_json(content)


def test_accepted_json() -> None:
    assert reader.parse_json(b'{"a": [1, -2.5, "\\ud83d\\udc15", null], "b": 18446744073709551615}') == {
        "a": [1, -2.5, "\U0001f415", None],
        "b": 2**64 - 1,
    }
    assert reader.parse_json(b"[" * 32 + b"]" * 32)


def test_only_regular_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "none"):
        with pytest.raises(reader.Malformed):
            reader.read_bytes(tmp_path / name)
    assert reader.read_bytes(tmp_path / "file") == b"x"
    with pytest.raises(reader.Malformed, match="longer than 0"):
        reader.read_bytes(tmp_path / "file", limit=0)


def test_lines(tmp_path: Path) -> None:
    long = b"x" * (reader.MAX_LINE_BYTES + 10)
    (tmp_path / "log").write_bytes(b"a\n" + long + b"\n\nb")
    assert list(reader.read_lines(tmp_path / "log")) == [
        (1, b"a", True),
        (2, None, True),
        (3, b"", True),
        (4, b"b", False),
    ]


def header(path: Path, value: object, data: bytes, *, length: int | None = None) -> Path:
    content = json.dumps(value).encode()
    path.write_bytes((len(content) if length is None else length).to_bytes(8, "little") + content + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_safetensors_header(tmp_path: Path) -> None:
    path = tmp_path / "w"
    found = reader.read_safetensors_header(header(path, {"b": entry(0, 8, [2]), "a": entry(8, 12, [])}, bytes(12)))
    assert {name: each.num_elements for name, each in found.tensors.items()} == {"b": 2, "a": 1}
    bad = [
        ({"a": entry(0, 8, [3])}, bytes(8), None),
        ({"a": entry(0, 8, [2])}, bytes(9), None),
        ({"a": entry(4, 8, [1])}, bytes(8), None),
        ({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}, bytes(8), None),
        ({"a": entry(0, 8, [2], "F33")}, bytes(8), None),
        ({"a": entry(0, 8, [-2])}, bytes(8), None),
        ({"a": entry(0, 0, [0] * 64)}, b"", None),
        ({"__metadata__": {"a": 1}}, b"", None),
        ([], b"", None),
        ({}, b"", 2**62),
    ]
    for value, data, length in bad:
        with pytest.raises(reader.Malformed):
            reader.read_safetensors_header(header(path, value, data, length=length))
    path.write_bytes(b"abc")
    with pytest.raises(reader.Malformed):
        reader.read_safetensors_header(path)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_give_a_value_or_a_reason(content: bytes) -> None:
    try:
        json.dumps(reader.parse_json(content), allow_nan=False)
    except reader.Malformed as problem:
        assert str(problem)
