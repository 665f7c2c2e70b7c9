"""Tokenizer: split pattern, byte table, special strings, file format, training."""

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from nexttransformer.data.shards import bundled_source, read_row_group, row_group_documents
from nexttransformer.data.tokenizer import (
    FILE_NAME,
    MAX_WHITESPACE_RUN,
    SPECIAL_TOKENS,
    Tokenizer,
    check_vocab_size,
    tokenizer_file,
)
from nexttransformer.data.tokenizer_training import train_tokenizer, training_texts
from nexttransformer.errors import DataError
from nexttransformer.protocol import get_protocol

# From the specification; "_" below stands for a space, "|" separates pieces.
SPLITS = {
    "I'm 12345 x": ["I", "'m", " ", "12", "34", "5", " x"],
    "f(x)=1;\n  y": ["f", "(x", ")=", "1", ";\n", " ", " y"],
    "a\n\n b": ["a", "\n\n", " b"],
    "HE'LL": ["HE", "'LL"],
    "don't_stop 3.14!!\r\nOK": ["don", "'t", "_stop", " ", "3", ".", "14", "!!\r\n", "OK"],
    "   x": ["  ", " x"],
}


@pytest.fixture(scope="module")
def tokenizer(prepared_test_v1: Path) -> Tokenizer:
    return Tokenizer.load(prepared_test_v1 / FILE_NAME)


def pieces_tokenizer(pieces: list[str]) -> Tokenizer:
    """Builds a tokenizer that merges each piece to one token and would join neighbouring pieces if it could."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    joined = [a + b for a, b in zip(pieces, pieces[1:], strict=False)]
    for text in [piece.encode()[:end] for piece in pieces for end in range(2, len(piece.encode()) + 1)]:
        ranks.setdefault(text, len(ranks))
    for text in joined:
        ranks.setdefault(text.encode(), len(ranks))
    return Tokenizer(tokenizer_file(ranks), "pieces")


@pytest.mark.parametrize("text", SPLITS)
def test_split_pattern(text: str) -> None:
    tokenizer = pieces_tokenizer(SPLITS[text])
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == SPLITS[text]


def test_published_tokenizer_of_test_v1(tokenizer: Tokenizer, prepared_test_v1: Path) -> None:
    published = get_protocol("test-v1").published()
    content = (prepared_test_v1 / FILE_NAME).read_bytes()
    assert tokenizer.digest == published["tokenizer"] == hashlib.sha256(content).hexdigest()
    assert tokenizer.byte_table_digest == published["byte_table"]
    value = json.loads(content)
    assert list(value) == sorted(value)
    assert (value["format"], value["format_version"], value["num_vocab"]) == ("tiktoken-bpe", 1, 512)
    assert value["special_tokens"]["<|bos|>"] == 512 - 9 == tokenizer.bos_id == len(value["mergeable_ranks"])
    assert list(value["special_tokens"].values()).__len__() == 9
    # Common words must have been found; a 32-bit pair counter once lost them elsewhere.
    assert {" the", " of", "ing", " and"} <= {tokenizer.decode([token]) for token in range(503)}


def test_rebuilds_a_tiktoken_encoding_with_nothing_else(tokenizer: Tokenizer, prepared_test_v1: Path) -> None:
    import tiktoken

    value = json.loads((prepared_test_v1 / FILE_NAME).read_text("utf-8"))
    encoding = tiktoken.Encoding(
        value["name"],
        pat_str=value["pattern"],
        mergeable_ranks={base64.b64decode(token): rank for token, rank in value["mergeable_ranks"].items()},
        special_tokens=value["special_tokens"],
        explicit_n_vocab=value["num_vocab"],
    )
    text = "It is 12345 o'clock: naïve café 🐕\n\n  <|bos|>"
    assert encoding.encode_ordinary(text) == tokenizer.encode(text)


def test_byte_lengths_sum_to_the_text_on_the_whole_corpus(tokenizer: Tokenizer) -> None:
    source = bundled_source()
    for name in (*source.training, *source.validation):
        path = source.fetch(name)
        texts = [text for group in range(len(row_group_documents(path))) for text in read_row_group(path, group)]
        ids = np.concatenate([np.array(part, dtype=np.int64) for part in tokenizer.encode_batch(texts)])
        assert int(tokenizer.byte_lengths[ids].sum()) == sum(len(text.encode()) for text in texts)


def test_byte_lengths_are_raw_bytes(tokenizer: Tokenizer) -> None:
    text = "naïve café 🐕"
    ids = tokenizer.encode(text)
    assert int(tokenizer.byte_lengths[ids].sum()) == 17 == len(text.encode())
    assert tokenizer.decode(ids) == text
    # A lone fragment of UTF-8 counts 1 byte, not the 3 of its replacement character.
    assert tokenizer.decode([0xF0]) == "�"
    assert tokenizer.byte_lengths[0xF0] == 1
    assert tokenizer.byte_lengths.dtype == np.int32
    assert tokenizer.byte_lengths[tokenizer.bos_id :].tolist() == [0] * 9


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_strings_in_a_document_are_ordinary_text(tokenizer: Tokenizer, special: str) -> None:
    text = f"before {special} after{special}"
    ids = tokenizer.encode(text)
    assert max(ids) < tokenizer.bos_id
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text]) == [ids]


def test_special_tokens_decode_to_their_names(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("x")]) == "<|bos|>x"
    with pytest.raises(DataError, match="Token id 512 is outside the vocabulary: expected 0 to 511"):
        tokenizer.decode([512])


def test_empty_text_has_no_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []


def test_long_runs_of_one_character(tokenizer: Tokenizer) -> None:
    for text in (" " * (MAX_WHITESPACE_RUN - 1) + "x", "a" * 300_000, "\n" * 100_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(DataError, match="run of 250,000 or more whitespace"):
        tokenizer.encode("x" + " " * MAX_WHITESPACE_RUN)


def test_training_depends_on_neither_document_order_nor_chunks() -> None:
    texts = ["low lower lowest", "new newer newest", "wide wider widest", "newer and lower"] * 3
    assert train_tokenizer(texts, vocab_size=280) == train_tokenizer(texts[::-1], vocab_size=280)


def test_too_little_text_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="expected 503 .*smaller vocabulary"):
        train_tokenizer(["a few words"], vocab_size=512)


def test_training_text_is_cut_and_ends_with_the_document_that_passes_the_total() -> None:
    texts = list(training_texts(["a" * 30, "b" * 5, "c" * 10, "d"], document_characters=10, total_characters=15))
    assert texts == ["a" * 10, "b" * 5, "c" * 10]


def test_all_problems_of_a_file_are_named(tmp_path: Path) -> None:
    value = json.loads(tokenizer_file({bytes([byte]): byte for byte in range(256)}))
    value.update(format_version=2, pattern=r"\w+", bos_token="<s>", num_vocab=9)
    value["mergeable_ranks"]["AA=="] = 7
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(value))
    with pytest.raises(DataError) as error:
        Tokenizer.load(path)
    for part in ("version 2", "'pattern'", "without gap", "'bos_token'", "'num_vocab' is 9: expected 265"):
        assert part in str(error.value)
    path.write_text('{"format": "tiktoken-bpe"}')
    with pytest.raises(DataError, match="not a tokenizer file"):
        Tokenizer.load(path)
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(tmp_path / "absent.json")


def test_vocabulary_size_is_checked(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="has 512 ids: expected 32,768"):
        check_vocab_size(tokenizer, vocab_size=32_768, where="t.json")
