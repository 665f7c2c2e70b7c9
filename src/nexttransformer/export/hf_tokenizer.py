"""The tokenizer as Transformers reads it: `tokenizer.json`, equal to tiktoken on every text.

BPE with `ignore_merges` (a piece that is a token is that token, as in tiktoken), merges recovered from the ranks,
Split on the protocol's pattern, then ByteLevel. Strings of special tokens inside a text stay ordinary text.
"""

import base64
from typing import Any

from nexttransformer import jsonio
from nexttransformer.data.tokenizer import BOS_TOKEN

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def byte_letters() -> dict[int, str]:
    """Returns byte -> the printable character that stands for it in a ByteLevel vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def recover_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Returns the two tokens that were merged into `token`: byte pair encoding of it with the earlier merges.

    Raises:
        ValueError: the ranks are not those of a byte pair encoding.
    """
    parts = [token[index : index + 1] for index in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        candidates = [
            (rank, index)
            for index in range(len(parts) - 1)
            if (rank := ranks.get(parts[index] + parts[index + 1], limit)) < limit
        ]
        if not candidates:
            break
        _, index = min(candidates)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    if len(parts) != 2:
        raise ValueError(f"token {token!r} of rank {limit} is not a merge of two earlier tokens")
    return parts[0], parts[1]


def tokenizer_json(content: bytes) -> bytes:
    """Returns `tokenizer.json` for the content of a checked `tokenizer.tiktoken.json`."""
    value = jsonio.parse_json(content, "tokenizer")
    ranks = {base64.b64decode(token): rank for token, rank in value["mergeable_ranks"].items()}
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(ranks, key=lambda token: ranks[token])
    merges = [[spell(part) for part in recover_merge(token, ranks)] for token in ordered if len(token) > 1]
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, token_id in sorted(value["special_tokens"].items(), key=lambda item: item[1])
    ]
    bos = value["bos_token"]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": value["pattern"]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        # Every document begins with BOS, so a text does too.
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [value["special_tokens"][bos]], "tokens": [bos]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spell(token): ranks[token] for token in ordered},
            "merges": merges,
        },
    }
    return jsonio.pretty_bytes(tokenizer)


def tokenizer_config_json(context_tokens: int) -> bytes:
    """Returns `tokenizer_config.json`. BOS also ends a text and pads: no text holds it, and masks hide padding."""
    return jsonio.pretty_bytes(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": BOS_TOKEN,
            "pad_token": BOS_TOKEN,
            "padding_side": "left",
            "model_max_length": context_tokens,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        }
    )
