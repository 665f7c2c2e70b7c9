"""Where a protocol's tokenizer comes from: given, kept from an earlier attempt, or trained with rustbpe.

The result depends neither on document order nor on the number of threads.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.data.manifest import data_constants
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.request import Request
from nexttransformer.data.shards import read_row_group, row_group_documents
from nexttransformer.data.tokenizer import (
    FILE_NAME,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    Tokenizer,
    check_vocab_size,
    tokenizer_file,
)
from nexttransformer.errors import DataError


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Trains a tokenizer and returns the bytes of its file.

    Args:
        texts: training text, already cut as the protocol says (`training_texts`).
        vocab_size: V, special tokens included.

    Raises:
        DataError: if the text has too few distinct pairs for V tokens (rustbpe stops without an error).
    """
    # The compiled module has no type information.
    from rustbpe import Tokenizer as Trainer  # pyright: ignore[reportAttributeAccessIssue]

    num_mergeable = vocab_size - len(SPECIAL_TOKENS)
    trainer = Trainer()
    trainer.train_from_iterator(iter(texts), num_mergeable, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) != num_mergeable:
        raise DataError(
            f"The tokenizer ends at {len(ranks):,} mergeable tokens: expected {num_mergeable:,} (vocabulary "
            f"{vocab_size:,} minus {len(SPECIAL_TOKENS)} special tokens). The text is too small for this vocabulary: "
            "give more text, or use a protocol with a smaller vocabulary."
        )
    return tokenizer_file(ranks)


def training_texts(documents: Iterable[str], *, document_characters: int, total_characters: int) -> Iterator[str]:
    """Cuts documents as the tokenizer's training sees them.

    Args:
        documents: texts in train order.
        document_characters: each document is cut to this many characters.
        total_characters: the document that passes this total is the last one.
    """
    seen = 0
    for document in documents:
        text = document[:document_characters]
        seen += len(text)
        yield text
        if seen > total_characters:
            return


def prepare_tokenizer(request: Request, work: Path, reporter: Reporter) -> Tokenizer:
    """Takes, keeps or trains the tokenizer and puts it into the data folder.

    Raises:
        DataError: if its size is not the protocol's, the text is too small, or it is not the published one.
    """
    target, protocol = request.folder / FILE_NAME, request.protocol
    record_path = work / "tokenizer.json"
    if request.tokenizer is not None:
        tokenizer = Tokenizer.load(request.tokenizer)
        check_vocab_size(tokenizer, vocab_size=protocol.vocab_size, where=str(request.tokenizer))
        jsonio.write_bytes_atomic(target, tokenizer.content)
    else:
        record = {
            "source": request.source.kind,
            "constants": data_constants(protocol),
            "sizes": [request.source.local_bytes.get(name) for name in request.source.training],
        }
        kept = target.is_file() and record_path.is_file()
        if not (kept and jsonio.read_json(record_path) == {**record, "digest": jsonio.file_digest(target)}):
            content = _train(request, reporter)
            jsonio.write_bytes_atomic(target, content)
            jsonio.write_json_atomic(record_path, {**record, "digest": jsonio.file_digest(target)})
        tokenizer = Tokenizer.load(target)
    expected = protocol.published().get("tokenizer")
    if request.is_published_checked and request.source.kind != "folder" and expected not in (None, tokenizer.digest):
        raise DataError(
            f"{target}: tokenizer digest is {tokenizer.digest}: expected {expected}, the published one of "
            f"{protocol.id}."
        )
    return tokenizer


def _train(request: Request, reporter: Reporter) -> bytes:
    protocol = request.protocol

    def documents() -> Iterator[str]:
        for name in request.source.training:
            path = request.source.fetch(name)
            for group in range(len(row_group_documents(path))):
                yield from read_row_group(path, group)

    with reporter.bar("training the tokenizer", unit="characters", total=protocol.tokenizer_training_characters) as bar:

        def texts() -> Iterator[str]:
            cut = protocol.tokenizer_document_characters
            total = protocol.tokenizer_training_characters
            for text in training_texts(documents(), document_characters=cut, total_characters=total):
                bar.advance(len(text))
                yield text

        return train_tokenizer(texts(), vocab_size=protocol.vocab_size)
