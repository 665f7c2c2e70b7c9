import pytest

from nexttransformer import jsonio
from nexttransformer.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": -1e999}', "the number -1e999 is too large"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'["\\ud800"]', "without its other half"),
        (b'{"\\uDFFF": 1}', "without its other half"),
        (b"[" * 100_000, "recursion"),
        (b'"\xff"', "utf-8"),
        (b"9" * 5000, "digits"),
    ],
)
def test_what_is_refused_in_one_line(content: bytes, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        jsonio.parse_json(content, "x.json")
    assert str(caught.value).startswith("x.json: not valid JSON: ") and "\n" not in str(caught.value)


def test_whole_characters_and_large_numbers_pass() -> None:
    content = b'{"a": "\\ud83d\\ude00", "b": 1e308, "c": "\\\\ud800"}'
    assert jsonio.parse_json(content, "x.json") == {"a": "\U0001f600", "b": 1e308, "c": "\\ud800"}
