"""The tokenizer: byte-level BPE in one self-contained JSON file, and its byte-length table.

Trained with rustbpe (`tokenizer_training.py`), used through tiktoken. Ids 0..255 are the single bytes
in byte order, then merges in rank order, then nine special tokens. Text is always encoded as ordinary
text: the string of a special token inside a document is plain bytes.

Letters: V vocabulary.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from nexttransformer import jsonio
from nexttransformer.errors import DataError, join_problems

FILE_NAME = "tokenizer.tiktoken.json"
FORMAT = "tiktoken-bpe"
FORMAT_VERSION = 1
# GPT-4's split pattern with groups of one or two digits instead of three.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
BOS_TOKEN = "<|bos|>"
SPECIAL_TOKENS = (
    BOS_TOKEN,
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
# tiktoken's regular expression engine keeps one backtracking state per whitespace character of a run
# and aborts near a million.
MAX_WHITESPACE_RUN = 250_000
_LONG_WHITESPACE = re.compile(rf"\s{{{MAX_WHITESPACE_RUN}}}")
_KEYS = {
    "format",
    "format_version",
    "name",
    "pattern",
    "mergeable_ranks",
    "special_tokens",
    "bos_token",
    "num_vocab",
}


class Tokenizer:
    """Text <-> token ids, and the number of raw bytes behind every id.

    Attributes:
        vocab_size: V, special tokens included.
        bos_id: the token before every document.
        byte_lengths: int32 [V], raw bytes of each ordinary token, 0 for special tokens.
        digest: SHA-256 of the tokenizer file.
        byte_table_digest: SHA-256 of `byte_lengths` as little-endian int32.
    """

    def __init__(self, content: bytes, where: str) -> None:
        """Builds the tokenizer from the bytes of a tokenizer file; `where` names it in messages."""
        value = jsonio.parse_json(content, where, DataError)
        ranks, special = _check_file(value, where)
        self.digest = hashlib.sha256(content).hexdigest()
        self.content = content
        self.vocab_size: int = value["num_vocab"]
        self.bos_id: int = special[value["bos_token"]]
        self.byte_lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, rank in ranks.items():
            self.byte_lengths[rank] = len(token)
        self.byte_lengths.flags.writeable = False
        self._encoding = tiktoken.Encoding(
            value["name"], pat_str=value["pattern"], mergeable_ranks=ranks, special_tokens=special
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads a tokenizer file.

        Raises:
            DataError: if it is missing or malformed; all problems of the file are named.
        """
        try:
            content = path.read_bytes()
        except OSError as problem:
            raise DataError(f"{path}: tokenizer cannot be read: {problem.strerror}. Run 'prepare_data'.") from None
        return cls(content, str(path))

    @cached_property
    def byte_table_digest(self) -> str:
        """SHA-256 of the byte-length table as little-endian int32."""
        return hashlib.sha256(self.byte_lengths.astype("<i4").tobytes()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without BOS; special-token strings are ordinary text."""
        _refuse_long_whitespace(text)
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[list[int]]:
        """Returns the ids of several texts, in order."""
        for text in texts:
            _refuse_long_whitespace(text)
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are no valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of ids; special tokens give their own string.

        Raises:
            DataError: if an id is outside 0..V-1.
        """
        known = [int(token) for token in ids]
        for token in known:
            if not 0 <= token < self.vocab_size:
                raise DataError(f"Token id {token} is outside the vocabulary: expected 0 to {self.vocab_size - 1}.")
        return self._encoding.decode_bytes(known)


def tokenizer_file(ranks: dict[bytes, int]) -> bytes:
    """Returns the file of a tokenizer: its bytes depend on the ranks alone."""
    vocab_size = len(ranks) + len(SPECIAL_TOKENS)
    value = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": f"nexttransformer-bpe-{vocab_size}",
        "pattern": SPLIT_PATTERN,
        "mergeable_ranks": {base64.b64encode(token).decode("ascii"): rank for token, rank in ranks.items()},
        "special_tokens": {token: len(ranks) + index for index, token in enumerate(SPECIAL_TOKENS)},
        "bos_token": BOS_TOKEN,
        "num_vocab": vocab_size,
    }
    return jsonio.pretty_bytes(value)


def check_vocab_size(tokenizer: Tokenizer, *, vocab_size: int, where: str) -> None:
    """Raises DataError if a tokenizer has another vocabulary size than the protocol."""
    if tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"{where}: the tokenizer has {tokenizer.vocab_size:,} ids: expected {vocab_size:,} (the protocol's). "
            "Name a tokenizer of this protocol, or none to have it trained."
        )


def _refuse_long_whitespace(text: str) -> None:
    if len(text) >= MAX_WHITESPACE_RUN and _LONG_WHITESPACE.search(text):
        raise DataError(
            f"A text holds a run of {MAX_WHITESPACE_RUN:,} or more whitespace characters, which the tokenizer cannot "
            "split. Remove that document from the source."
        )


def _check_file(value: Any, where: str) -> tuple[dict[bytes, int], dict[str, int]]:
    """Returns (mergeable ranks, special tokens) of a parsed file; raises DataError with all problems."""
    if not isinstance(value, dict) or set(value) != _KEYS:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{where}: not a tokenizer file: expected the keys {sorted(_KEYS)}, got {found}.")
    problems = []
    if (value["format"], value["format_version"]) != (FORMAT, FORMAT_VERSION):
        problems.append(
            f"{where}: format is {value['format']!r} version {value['format_version']!r}: expected {FORMAT!r} "
            f"version {FORMAT_VERSION}."
        )
    if value["pattern"] != SPLIT_PATTERN:
        problems.append(f"{where}: 'pattern' is not the protocol's split pattern.")
    ranks: dict[bytes, int] = {}
    try:
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in value["mergeable_ranks"].items()}
    except (AttributeError, ValueError) as problem:
        problems.append(f"{where}: 'mergeable_ranks' must map base64 to ranks: {problem}.")
    else:
        if sorted(map(str, ranks.values())) != sorted(map(str, range(len(value["mergeable_ranks"])))):
            problems.append(f"{where}: ranks must be the whole numbers from 0 without gap or repetition.")
        elif any(ranks.get(bytes([byte])) != byte for byte in range(256)):
            problems.append(f"{where}: ids 0..255 must be the single bytes in byte order.")
    expected = {token: len(ranks) + index for index, token in enumerate(SPECIAL_TOKENS)}
    if value["special_tokens"] != expected:
        problems.append(f"{where}: 'special_tokens' must be {expected}.")
    if value["bos_token"] != BOS_TOKEN:
        problems.append(f"{where}: 'bos_token' must be {BOS_TOKEN!r}.")
    if value["num_vocab"] != len(ranks) + len(SPECIAL_TOKENS):
        problems.append(f"{where}: 'num_vocab' is {value['num_vocab']!r}: expected {len(ranks) + len(SPECIAL_TOKENS)}.")
    if problems:
        raise DataError(join_problems(problems))
    return ranks, expected
