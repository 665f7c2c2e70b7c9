"""D1 to D4: what was read and in which order, against the published digests."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from nexttransformer.audit.check import Finding, Needs, check, differs, error, unjudged
from nexttransformer.audit.event_schema import CheckpointSaved
from nexttransformer.audit.run_view import RunView
from nexttransformer.data import order
from nexttransformer.data.loader import TrainingRows
from nexttransformer.data.manifest import SPLITS, DocumentRange, Manifest, load_manifest
from nexttransformer.training.events import EventKey
from nexttransformer.training.run_schema import DataDigests

_D1_KEYS = ("manifest", "tokenizer", "byte_table", "data_order")
_VALIDATION = ("val_curve", "val_final")


def _recorded_data(view: RunView) -> Iterator[tuple[str, Any]]:
    """Yields (place, digests) of run, attempts and checkpoints."""
    if view.run.value is not None:
        yield "run.json data", view.run.value.data
    for checkpoint in view.checkpoints.values():
        if checkpoint.state.value is not None:
            yield f"{checkpoint.state.where} digests", checkpoint.state.value.digests
    for logged, meta in view.attempt_starts:
        yield f"{logged.where} meta.data", meta.data
    view.run.get()


@check("D1")
def check_digests(view: RunView) -> Iterator[Finding]:
    """Manifest, tokenizer, byte table, data order."""
    expected = {key: view.reference.require_published(key) for key in _D1_KEYS}
    for where, data in _recorded_data(view):
        for key, value in expected.items():
            yield from differs(
                f"The digest of the {key.replace('_', ' ')}", f"{where}.{key}", expected=value, got=getattr(data, key)
            )
    for name, cell in view.evaluations.items():
        if cell.value is not None and cell.value.core is not None:
            where, got = f"{name} core.tokenizer_digest", cell.value.core.tokenizer_digest
            yield from differs("The digest of the tokenizer", where, expected=expected["tokenizer"], got=got)


@check("D2")
def check_order(view: RunView) -> Iterator[Finding]:
    """The chain over the rows of every update."""
    metrics, timeline = view.metrics.get(), view.timeline
    published = view.reference.data_order
    if not published and view.reference.data_folder is None:
        yield unjudged(
            f"Needs the published data order of {timeline.num_updates:,} updates; give --data.", "published data_order"
        )
    # From update 0 as far as lines reach without a gap; behind a gap nothing can be recomputed.
    chain, chains = order.initial_chain(), {0: order.initial_chain()}
    stop = int(timeline.missing[0]) if len(timeline.missing) else timeline.num_updates + 1
    for update in range(1, stop):
        index = timeline.line_of[update]
        chain = order.next_chain(chain, update, int(metrics.rows_hash[index]))
        chains[update] = chain
        if chain != int(metrics.data_chain[index]):
            got = order.to_hex(int(metrics.data_chain[index]))
            yield error(
                "The stored chain is not that of the row hashes.",
                metrics.where(index, "data_chain"),
                expected=order.to_hex(chain),
                got=got,
            )
    is_unfinished = timeline.line_of[timeline.num_updates] < 0
    for update, value in sorted(published.items()):
        if update in chains and chains[update] != value:
            where = metrics.where(timeline.line_of[update], "data_chain") if update else "metrics.jsonl"
            message = f"The data order differs from the published one at update {update:,}."
            yield error(message, where, expected=order.to_hex(value), got=order.to_hex(chains[update]))
        elif update not in chains and is_unfinished:
            yield error(
                f"The published value at update {update:,} was never reached.",
                "metrics.jsonl",
                expected=order.to_hex(value),
            )
    if len(timeline.missing) and not is_unfinished:
        yield unjudged(
            f"Update {stop} has no metrics line, so the chain cannot be recomputed behind it; see T1.", "metrics.jsonl"
        )
    stored = [
        (f"{cell.where} data_chain", cell.value.update, cell.value.data_chain)
        for checkpoint in view.checkpoints.values()
        for cell in (checkpoint.marker, checkpoint.state)
        if cell.value is not None
    ]
    for logged in view.events.get().of(EventKey.CHECKPOINT_SAVED):
        is_effective = timeline.effective_attempt(logged.event.update) == logged.event.attempt
        if isinstance(logged.meta, CheckpointSaved) and is_effective:
            stored.append((f"{logged.where} meta.data_chain", logged.event.update, logged.meta.data_chain))
    for where, update, got in stored:
        if update in chains:
            yield from differs(f"The chain at update {update:,}", where, expected=order.to_hex(chains[update]), got=got)
    if view.reference.data_folder is not None:
        yield from _compare_rows(view)


def _compare_rows(view: RunView) -> Iterator[Finding]:
    """Recomputes the row hashes of every update from the prepared rows themselves."""
    metrics, timeline, protocol = view.metrics.get(), view.timeline, view.reference.protocol
    folder = view.reference.data_folder
    assert folder is not None
    manifest, run = load_manifest(folder), view.run.get()
    if manifest.digest != run.data.manifest:
        raise Needs("Needs the data of this run; --data names other data.", "run.json data.manifest")
    rows = TrainingRows(folder, protocol)
    for index in timeline.lines:
        update = int(metrics.update[index])
        expected = order.sum_hashes(order.row_hashes(rows.rows(update - 1, 0, protocol.global_batch_rows)))
        got = int(metrics.rows_hash[index])
        if expected != got:
            yield error(
                "The rows of an update are not the data's.",
                metrics.where(index, "rows_hash"),
                expected=order.to_hex(expected),
                got=order.to_hex(got),
            )


@check("D3")
def check_validation(view: RunView) -> Iterator[Finding]:
    """Validation splits and byte table of every evaluation."""
    protocol = view.reference.protocol
    splits = {name: view.reference.require_published(name) for name in _VALIDATION}
    byte_table = view.reference.require_published("byte_table")
    for where, data in _recorded_data(view):
        for split, facts in splits.items():
            yield from differs(
                f"The digest of {split}", f"{where}.{split}", expected=facts["digest"], got=getattr(data, split)
            )
        if isinstance(data, DataDigests):
            place = f"{where}.byte_table_version"
            yield from differs(
                "The byte table's version", place, expected=protocol.byte_table_version, got=data.byte_table_version
            )
    for name, cell in view.evaluations.items():
        for split, score in (cell.value.bpb if cell.value is not None else {}).items():
            where = f"{name} bpb.{split}"
            if split not in splits:
                yield error("Not a validation split.", where, expected=list(splits), got=split)
                continue
            facts = {"split_digest": splits[split]["digest"], "byte_table_digest": byte_table}
            facts |= {"byte_table_version": protocol.byte_table_version}
            facts |= {key: splits[split][key] for key in ("rows", "tokens_counted", "bytes")}
            for key, expected in facts.items():
                yield from differs(f"{key} of {split}", f"{where}.{key}", expected=expected, got=getattr(score, key))


@check("D4")
def check_documents(view: RunView) -> Iterator[Finding]:
    """Documents and shards of the three splits, from the manifest."""
    run, folder = view.run.get(), view.reference.data_folder
    if folder is None:
        # The published manifest was compared by the maintainers when they published it.
        published = view.reference.require_published("manifest")
        if run.data.manifest != published:
            yield unjudged(
                "Needs the manifest of this run's data, which is not the published one; give --data.",
                "run.json data.manifest",
            )
        return
    manifest = load_manifest(folder)
    if manifest.digest != run.data.manifest:
        raise Needs("Needs the data of this run; --data names other data.", "run.json data.manifest")
    yield from document_problems(manifest)


def document_problems(manifest: Manifest) -> Iterator[Finding]:
    """Yields an error for every document or shard that is on both sides of a border."""
    sides: dict[str, set[str]] = {"train": set(), "validation": set()}
    for number, shard in enumerate(manifest.shards):
        sides[shard.split] |= {shard.name, shard.sha256}
        if {shard.name, shard.sha256} & sides["validation" if shard.split == "train" else "train"]:
            yield error(
                "A shard is in both training and validation.", f"manifest.json shards[{number}]", got=shard.name
            )
    for name in SPLITS:
        side = "train" if name == "train" else "validation"
        for number, part in enumerate(manifest.splits[name].documents):
            shard = manifest.shards[part.shard]
            if shard.split != side:
                yield error(
                    f"{name} reads a shard of the other side.",
                    f"manifest.json splits.{name}.documents[{number}]",
                    expected=side,
                    got=shard.name,
                )
    for first, second in combinations(SPLITS, 2):
        for one in manifest.splits[first].documents:
            for other in manifest.splits[second].documents:
                if one.shard == other.shard and (document := _common_document(one, other)) is not None:
                    where = f"manifest.json splits.{second}.documents"
                    yield error(
                        f"A document is in both {first} and {second}.",
                        where,
                        got=f"shard {one.shard} document {document}",
                    )


def _common_document(one: DocumentRange, other: DocumentRange) -> int | None:
    """Returns the first document that two ranges share."""
    first, second = (range(part.start, part.stop, part.step) for part in (one, other))
    short, long = sorted((first, second), key=len)
    return next((document for document in short if document in long), None)
