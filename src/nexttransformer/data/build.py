"""From a source to row files: tokenizer, token files, row plans, row files.

Finished token files and the tokenizer are kept in `work/` until the manifest exists, so that an
interrupted attempt continues; what is kept is verified before it is used.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from nexttransformer.data.encoding import DocumentStream
from nexttransformer.data.manifest import ROWS_PER_FILE, DocumentRange, Shard, data_constants
from nexttransformer.data.packing import CURVE_EVERY_DOCUMENTS, RowPlan, plan_rows, validation_documents
from nexttransformer.data.published import wanted_rows
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.request import KEPT_FRACTION, Request, check_space
from nexttransformer.data.rows import WrittenSplit, write_split
from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
from nexttransformer.data.tokenizer_training import prepare_tokenizer
from nexttransformer.data.workers import Workers
from nexttransformer.errors import DataError

WORK_FOLDER = "work"


class Build:
    """One preparation: holds what its steps share."""

    def __init__(self, request: Request, reporter: Reporter, workers: Workers) -> None:
        self.request, self.reporter, self.workers = request, reporter, workers
        self.protocol, self.source, self.folder = request.protocol, request.source, request.folder
        self.work = request.folder / WORK_FOLDER
        self.row_tokens = request.protocol.context_tokens + 1
        self.wanted = {**wanted_rows(request.protocol), "train": request.num_rows}

    def run(self) -> tuple[dict[str, Any], np.ndarray]:
        """Writes tokenizer and rows.

        Returns:
            The manifest's content but for the data order, and the hashes of the training rows
            (uint64 [R]).
        """
        self.work.mkdir(exist_ok=True)
        check_space(self.request)
        for name in self.source.validation:
            self.source.fetch(name)
        tokenizer = prepare_tokenizer(self.request, self.work, self.reporter)
        training, train, hashes = self._training(tokenizer)
        validation, splits = self._validation(tokenizer, first_shard=len(training))
        content = {
            "protocol": self.protocol.id,
            "constants": data_constants(self.protocol),
            "source": self.source.kind,
            "is_repeated": self.request.is_repeated,
            "tokenizer_digest": tokenizer.digest,
            "byte_table_digest": tokenizer.byte_table_digest,
            "rows_per_file": ROWS_PER_FILE,
            "shards": [shard.model_dump() for shard in training + validation],
            "splits": {"train": train, **splits},
        }
        return content, hashes

    def _training(self, tokenizer: Tokenizer) -> tuple[list[Shard], dict[str, Any], np.ndarray]:
        """Reads shards until the rows are full; returns (shards read, split entry, row hashes)."""
        stream = self._stream()
        with self.reporter.bar("tokenizing training text", unit="tokens") as bar:
            total = self.wanted["train"] * self.row_tokens / KEPT_FRACTION
            lengths = stream.lengths(self.source.training, split="train", bar=bar, total_tokens=total)
            plan = self._plan(lengths, "train")
            lengths.close()
        ranges = document_ranges(stream.listed, np.arange(plan.num_documents_read), step=1, first_shard=0)
        written = self._write(plan, stream, "train", tokenizer)
        # The stream may have looked at one shard more than the rows needed.
        shards = stream.listed[: ranges[-1].shard + 1]
        return shards, _entry(written, plan, ranges), written.hashes

    def _validation(self, tokenizer: Tokenizer, *, first_shard: int) -> tuple[list[Shard], dict[str, Any]]:
        """Reads all validation shards; returns them and the entries of both splits."""
        stream = self._stream()
        with self.reporter.bar("tokenizing validation text", unit="tokens") as bar:
            names = self.source.validation
            lengths = np.fromiter(stream.lengths(names, split="validation", bar=bar, total_tokens=0), dtype=np.int64)
        entries = {}
        for split in ("val_curve", "val_final"):
            members = validation_documents(len(lengths), split)
            plan = self._plan(iter(lengths[members].tolist()), split)
            used = members[: plan.num_documents_read]
            ranges = document_ranges(stream.listed, used, step=CURVE_EVERY_DOCUMENTS, first_shard=first_shard)
            written = self._write(
                dataclasses.replace(plan, documents=members[plan.documents]), stream, split, tokenizer
            )
            entries[split] = _entry(written, plan, ranges)
        return stream.listed, entries

    def _stream(self) -> DocumentStream:
        return DocumentStream(
            source=self.source, folder=self.work, tokenizer=self.folder / FILE_NAME, workers=self.workers
        )

    def _plan(self, lengths: Iterator[int], split: str) -> RowPlan:
        buffer_documents = self.protocol.packing_buffer_documents
        plan = plan_rows(
            lengths, capacity=self.row_tokens, buffer_documents=buffer_documents, max_rows=self.wanted[split]
        )
        if not plan.num_rows:
            raise DataError(
                f"The {split} documents fill no row of {self.row_tokens:,} tokens: expected up to "
                f"{self.wanted[split]:,} rows. Give more text."
            )
        return plan

    def _write(self, plan: RowPlan, stream: DocumentStream, split: str, tokenizer: Tokenizer) -> WrittenSplit:
        with self.reporter.bar(f"writing {split}", unit="rows", total=plan.num_rows) as bar:
            return write_split(
                plan,
                stream.encoded,
                folder=self.folder / split,
                row_tokens=self.row_tokens,
                byte_lengths=tokenizer.byte_lengths,
                workers=self.workers,
                bar=bar,
            )


def document_ranges(listed: list[Shard], documents: np.ndarray, *, step: int, first_shard: int) -> list[DocumentRange]:
    """Describes documents of a stream as ranges inside its shards.

    Args:
        listed: the stream's shards in order.
        documents: int64, increasing indices over all documents of the stream; regular with period `step`
            in each residue class.
        step: the period.
        first_shard: number of the stream's first shard in the manifest.
    """
    ranges = []
    start = 0
    for number, shard in enumerate(listed, start=first_shard):
        first, last = np.searchsorted(documents, [start, start + shard.documents])
        inside = documents[first:last] - start
        for residue in range(step):
            part = inside[inside % step == residue]
            if part.size:
                ranges.append(DocumentRange(shard=number, start=int(part[0]), stop=int(part[-1]) + 1, step=step))
        start += shard.documents
    return ranges


def _entry(written: WrittenSplit, plan: RowPlan, ranges: list[DocumentRange]) -> dict[str, Any]:
    return {
        "rows": written.rows,
        "tokens_counted": written.tokens_counted,
        "bytes": written.bytes,
        "digest": written.digest,
        "is_exhausted": plan.is_exhausted,
        "files": [file.model_dump() for file in written.files],
        "documents": [part.model_dump() for part in ranges],
    }
