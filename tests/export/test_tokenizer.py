"""`tokenizer.json` against tiktoken: the bundled corpus (all of it: slow), odd Unicode, random text; merges by hand."""

import json
import random
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import tokenizers

from nexttransformer.data.tokenizer import Tokenizer, tokenizer_file
from nexttransformer.export.hf_tokenizer import byte_letters, recover_merge, tokenizer_json

CORPUS = Path(__file__).parents[2] / "src/nexttransformer/resources/corpus"
ODD = [
    "",
    " ",
    "   ",
    "\n\n\n  \n x",
    "\x85x\x85\x85 y",
    "\x1c\x1d a\x1f",
    "naïve café 🐕",
    "a\u200bb\u200d\u2028c\u2029",
    "ﬀ ǅ İ ı ſ 'S 'ſ 'LL 'Ve K'K",
    "١٢٣٤ ²³ ⅷ 一二三 12345",
    "\ufeff x\r\n\r\n  \t\u3000\u3000a",
    "🏳️‍🌈👩‍👩‍👧",
    "\x00\x01\x7f",
    "<|bos|> hi <|user_start|>",
    "e\u0301\u0301a",
    "\u180e a",
    "\U0010ffff\U000e0001",
]


@pytest.fixture(scope="module")
def pair(prepared_data: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    ours = Tokenizer.load(prepared_data / "tokenizer.tiktoken.json")
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(ours.content).decode())
    # As `split_special_tokens` of tokenizer_config.json sets it.
    theirs.encode_special_tokens = True
    return ours, theirs


def differing(pair: tuple[Tokenizer, tokenizers.Tokenizer], texts: list[str]) -> list[str]:
    ours, theirs = pair
    expected = ours.encode_batch(texts)
    got = theirs.encode_batch_fast(texts, add_special_tokens=False)
    return [text for text, a, b in zip(texts, expected, got, strict=True) if a != b.ids]


def corpus() -> list[str]:
    return [text for path in sorted(CORPUS.glob("*.parquet")) for text in parquet.read_table(path)["text"].to_pylist()]


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_documents_of_the_corpus(pair: tuple[Tokenizer, tokenizers.Tokenizer], step: int) -> None:
    texts = corpus()
    assert len(texts) == 2688
    assert differing(pair, texts[::step]) == []


def test_odd_unicode(pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    assert differing(pair, ODD) == []


def test_random_text_and_back(pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    generator = random.Random(0)

    def character() -> str:
        code = generator.choice([generator.randrange(0x110000), generator.randrange(0x3000), *b"\t\n\r  a1'"])
        return chr(code) if not 0xD800 <= code < 0xE000 else "x"

    texts = ["".join(character() for _ in range(generator.randrange(1, 40))) for _ in range(4000)]
    assert differing(pair, texts) == []
    ours, theirs = pair
    assert all(theirs.decode(ours.encode(text), skip_special_tokens=False) == text for text in texts[:500])


def test_bos_comes_first_by_default(pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, theirs = pair
    assert theirs.encode("a river").ids == [ours.bos_id, *ours.encode("a river")]


def test_merges_by_hand() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (b"th", b"he", b"the", b"ther", b"her"):
        ranks[token] = len(ranks)
    # "he" would split "the" otherwise; "th" has the lower rank and is merged first.
    assert recover_merge(b"the", ranks) == (b"th", b"e")
    assert recover_merge(b"ther", ranks) == (b"the", b"r")
    assert recover_merge(b"her", ranks) == (b"he", b"r")
    written = json.loads(tokenizer_json(tokenizer_file(ranks)))
    assert written["model"]["merges"] == [["t", "h"], ["h", "e"], ["th", "e"], ["the", "r"], ["he", "r"]]
    with pytest.raises(ValueError, match="not a merge"):
        recover_merge(b"xyz", {**ranks, b"xyz": 300})


def test_letters_are_those_of_gpt2() -> None:
    letters = byte_letters()
    assert len(set(letters.values())) == 256
    assert (letters[ord(" ")], letters[ord("\n")], letters[0], letters[0xAD], letters[ord("A")]) == (
        "Ġ",
        "Ċ",
        "Ā",
        "Ń",
        "A",
    )
