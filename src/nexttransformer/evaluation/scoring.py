"""One evaluation from start to record: the functions shared by the trainer and the `evaluate` command."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from nexttransformer.errors import CheckpointError, DataError, NextTransformerError, ProtocolError, join_problems
from nexttransformer.evaluation import results
from nexttransformer.evaluation.bpb import score_split
from nexttransformer.evaluation.core import score_core
from nexttransformer.evaluation.inputs import EvaluationInputs, digest_problems, open_inputs
from nexttransformer.evaluation.progress import Progress
from nexttransformer.evaluation.results import EvaluationKind, EvaluationRecord
from nexttransformer.models import Decoder, build_model, config_from_dict
from nexttransformer.models.layers import cached_weights
from nexttransformer.protocol import Protocol, get_protocol
from nexttransformer.site_config import SiteConfig
from nexttransformer.training import checkpoint_files
from nexttransformer.training.checkpoint_load import EvaluationCheckpoint, load_for_evaluation, load_weights
from nexttransformer.training.checkpoint_schema import ProtocolReference
from nexttransformer.training.collectives import Collectives, on_all_ranks
from nexttransformer.training.run_schema import Mode

CURVE_SPLIT = "val_curve"
FINAL_SPLIT = "val_final"


@dataclass(frozen=True)
class Subject:
    """Whose weights are evaluated; copied into the result. `complete_digest` is None before any checkpoint."""

    run_id: str
    mode: Mode
    method: str
    update: int
    complete_digest: str | None
    weights_digest: str


def evaluate_model(
    model: Decoder,
    inputs: EvaluationInputs,
    subject: Subject,
    *,
    kind: EvaluationKind,
    splits: tuple[str, ...],
    want_core: bool,
    micro_batch: int,
    collectives: Collectives,
    limit: int | None = None,
    num_bpb_rows: int | None = None,
    console: Console | None = None,
) -> EvaluationRecord:
    """Scores a model. Collective; changes no training state (weights, random numbers, training mode).

    Args:
        model: weights on their device; wrappers (DDP) removed.
        inputs: opened with at least these splits, and a bundle if CORE is wanted.
        subject: whose weights these are.
        kind: which file this becomes.
        splits: validation splits to score.
        want_core: whether to score CORE.
        micro_batch: rows per pass and process, for BPB.
        collectives: over a CPU group.
        limit: CORE rows per task; only for standalone evaluations.
        num_bpb_rows: only the first rows of each split (smoke runs).
        console: for progress, on rank 0.

    Returns:
        The record, on every rank; what could not be computed is named in `errors`.

    Raises:
        ConfigError: if `limit` leaves a task too few rows.
        ProtocolError: if `limit` is given for a formal run's own evaluation.
    """
    if limit is not None and kind != "standalone" and subject.mode == "formal":
        raise ProtocolError("--limit: a formal run's own evaluations score all CORE rows. Leave it out.")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    model.set_step(subject.update)
    shown = console if collectives.rank == 0 else None
    place = {"rank": collectives.rank, "world_size": collectives.world_size, "gather": collectives.gather_objects}
    protocol, tokenizer = inputs.protocol, inputs.tokenizer
    bpb, core, errors = {}, None, []
    casts = ExitStack()
    try:
        casts.enter_context(cached_weights(model))
        for split in splits:
            try:
                result = score_split(
                    model,
                    inputs.readers[split],
                    tokenizer.byte_lengths,
                    split=split,
                    device=device,
                    micro_batch=micro_batch,
                    num_rows=num_bpb_rows,
                    progress=None if shown is None else Progress(f"BPB {split}", shown),
                    **place,
                )
                if result is not None:
                    expected = inputs.manifest.splits[split]
                    counted = (result.rows, result.tokens_counted, result.bytes)
                    if result.rows == expected.rows and counted[1:] != (expected.tokens_counted, expected.bytes):
                        raise DataError(f"{split}: counted {counted}, the manifest says {expected.summary()}.")
                    bpb[split] = results.SplitScore.of(
                        result,
                        split_digest=expected.digest,
                        table_version=protocol.byte_table_version,
                        table_digest=tokenizer.byte_table_digest,
                    )
            except NextTransformerError as problem:
                # Only rank 0 can come here, after the last collective of the split.
                errors.append(str(problem))
        if want_core:
            assert inputs.bundle is not None
            is_strict = subject.mode == "formal"
            questions = on_all_ranks(lambda: inputs.core_questions(limit=limit, is_strict=is_strict), collectives)
            result = score_core(
                model,
                inputs.bundle,
                questions,
                pad_id=tokenizer.bos_id,
                device=device,
                batch_tokens=protocol.core_batch_tokens,
                limit=limit,
                progress=None if shown is None else Progress("CORE", shown),
                **place,
            )
            if result is not None:
                core = results.as_core_score(result.to_json(tokenizer_digest=tokenizer.digest))
                errors += result.errors
    finally:
        casts.close()
        model.train(was_training)
    record = EvaluationRecord(
        kind=kind,
        run_id=subject.run_id,
        mode=subject.mode,
        method=subject.method,
        update=subject.update,
        protocol=ProtocolReference(id=protocol.id, digest=protocol.digest),
        checkpoint=results.EvaluatedCheckpoint(
            complete_digest=subject.complete_digest, weights_digest=subject.weights_digest
        ),
        software=results.Software.current(),
        precision=str(model.compute_dtype).removeprefix("torch."),
        num_processes=collectives.world_size,
        micro_batch=micro_batch,
        bpb=bpb,
        core=core,
        errors=errors,
    )
    return collectives.broadcast_object(record)


def evaluate_checkpoint(
    checkpoint: EvaluationCheckpoint,
    site: SiteConfig,
    *,
    kind: EvaluationKind,
    want_bpb: bool,
    want_core: bool,
    micro_batch: int,
    device: torch.device,
    collectives: Collectives,
    limit: int | None = None,
    console: Console | None = None,
) -> EvaluationRecord:
    """Evaluates a checkpoint that `open_checkpoint` read, from its files alone. Collective.

    BPB means `val_curve`, and at the run's last update also `val_final`.

    Raises:
        NextTransformerError: if data, bundle or configuration differ from what the checkpoint names.
    """
    state = checkpoint.state
    protocol = known_protocol(checkpoint)
    is_last = state.update == state.last_update
    splits = () if not want_bpb else (CURVE_SPLIT, FINAL_SPLIT) if is_last else (CURVE_SPLIT,)

    def prepare() -> tuple[EvaluationInputs, Decoder]:
        inputs = open_inputs(site, protocol, splits=splits, want_core=want_core)
        problems = digest_problems(inputs, state.digests)
        if problems:
            raise DataError(join_problems([f"{checkpoint.path}: {problem}" for problem in problems]))
        if want_core:
            inputs.core_questions(limit=limit, is_strict=state.mode == "formal")
        config = config_from_dict(checkpoint.model_config)
        if config.digest != state.digests.config:
            raise CheckpointError(f"{checkpoint.path}: model_config.json is not the configuration of its run.")
        model = build_model(config, device, seed=None)
        load_weights(checkpoint.path / checkpoint_files.MODEL_FILE, dict(model.named_parameters()))
        return inputs, model

    inputs, model = on_all_ranks(prepare, collectives)
    subject = Subject(
        run_id=state.run_id,
        mode=state.mode,
        method=state.method,
        update=state.update,
        complete_digest=checkpoint.complete_digest,
        weights_digest=checkpoint.marker.weights_digest,
    )
    return evaluate_model(
        model,
        inputs,
        subject,
        kind=kind,
        splits=splits,
        want_core=want_core,
        micro_batch=micro_batch,
        collectives=collectives,
        limit=limit,
        console=console,
    )


def open_checkpoint(path: Path, collectives: Collectives) -> EvaluationCheckpoint:
    """Reads a complete checkpoint and checks that this package knows its protocol. Collective.

    Raises:
        CheckpointError: incomplete or damaged; the file is named.
        ProtocolError: of a protocol that this version does not have.
    """
    checkpoint = load_for_evaluation(path, collectives)
    known_protocol(checkpoint)
    return checkpoint


def known_protocol(checkpoint: EvaluationCheckpoint) -> Protocol:
    """Returns the package's protocol of a checkpoint; its constants must be the recorded ones."""
    protocol = get_protocol(checkpoint.protocol.id)
    if protocol.digest != checkpoint.protocol.digest:
        raise ProtocolError(
            f"{checkpoint.path}: protocol {protocol.id} has digest {checkpoint.protocol.digest[:16]}... there and "
            f"{protocol.digest[:16]}... in this version. Evaluate with the version that trained it."
        )
    return protocol
