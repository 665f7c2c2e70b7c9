"""E5, only with --deep: a fixed slice of the final evaluations scored again on this machine."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch

from nexttransformer import site_config
from nexttransformer.audit.bpb_rules import bpb_of
from nexttransformer.audit.check import Finding, Needs, unjudged, warning
from nexttransformer.audit.core_rules import correct_bits
from nexttransformer.audit.presets import evaluation_name
from nexttransformer.audit.run_view import RunView
from nexttransformer.data.loader import RowReader
from nexttransformer.data.tokenizer import FILE_NAME, Tokenizer
from nexttransformer.errors import NextTransformerError
from nexttransformer.evaluation.bpb import row_sums
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, Bundle, load_bundle
from nexttransformer.evaluation.core import score_core
from nexttransformer.evaluation.preparation import prepare_core
from nexttransformer.evaluation.questions import PromptRules
from nexttransformer.models import Decoder, build_model
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE
from nexttransformer.training.checkpoint_files import MODEL_FILE
from nexttransformer.training.checkpoint_load import load_weights

NUM_BPB_ROWS = 64
NUM_CORE_ROWS = 20
BPB_TOLERANCE = 0.002
# A slice of a longer split differs from the whole by chance: so many standard errors are allowed on top.
NUM_STANDARD_ERRORS = 4.0
MAX_FLIPPED_FRACTION = 0.02


def rescore(view: RunView) -> Iterator[Finding]:
    """Scores the first 64 rows of val_final and the first 20 rows of each CORE task with the final weights."""
    folder = view.reference.data_folder
    if folder is None:
        raise Needs("Needs the prepared data: give --data with --deep.", "--deep")
    checkpoint, protocol = view.newest, view.reference.protocol
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(view.config, device, seed=None)
    load_weights(view.root / checkpoint.path(MODEL_FILE), dict(model.named_parameters()))
    model.eval()
    model.set_step(protocol.num_updates)
    tokenizer = Tokenizer.load(folder / FILE_NAME)
    if tokenizer.digest != view.run.get().data.tokenizer:
        raise Needs("Needs the data of this run; --data names other data.", "run.json data.tokenizer")
    yield from _bpb(view, model, RowReader(folder, "val_final"), tokenizer, device)
    yield from _core(view, model, tokenizer, device)


@torch.no_grad()
def _bpb(
    view: RunView, model: Decoder, rows: RowReader, tokenizer: Tokenizer, device: torch.device
) -> Iterator[Finding]:
    score = view.evaluation("final.json").get().bpb.get("val_final")
    if score is None or rows.split.digest != score.split_digest:
        yield unjudged("Needs val_final of this run; see D3.", "evaluations/final.json")
        return
    nats, lengths = [], []
    for index in range(min(NUM_BPB_ROWS, rows.num_rows)):
        ids_1T = torch.from_numpy(rows.read([index]).astype(np.int64)).to(device)
        nats_1T = model(ids_1T[:, :-1], ids_1T[:, 1:]).float().cpu().numpy()
        row_nats, row_bytes, _ = row_sums(nats_1T, tokenizer.byte_lengths[ids_1T[:, 1:].cpu().numpy()])
        nats.append(float(row_nats[0]))
        lengths.append(int(row_bytes[0]))
    got = math.fsum(nats) / (math.log(2) * sum(lengths))
    tolerance = BPB_TOLERANCE
    if len(nats) < rows.num_rows:
        # Standard error of a ratio of sums, with the correction for a finite population.
        residuals = np.array(nats) / math.log(2) - got * np.array(lengths)
        spread = float(np.sqrt((residuals**2).sum() / (len(nats) - 1) * len(nats))) / sum(lengths)
        tolerance += NUM_STANDARD_ERRORS * spread * math.sqrt(1 - len(nats) / rows.num_rows)
    expected = bpb_of(score)
    if not abs(got - expected) <= tolerance:
        wanted = f"{expected:.6f} within {tolerance:.4f}"
        yield warning(
            "val_final scored again on this machine differs.",
            "evaluations/final.json bpb.val_final",
            expected=wanted,
            got=f"{got:.6f}",
        )


def _open_bundle(view: RunView) -> Bundle:
    """Opens the protocol's bundle: the shipped excerpt, or the one that the site file names."""
    name = view.reference.protocol.core_bundle
    if name == EXCERPT_BUNDLE:
        return load_bundle(EXCERPT_FOLDER, BUNDLE_TASKS_DIGESTS[name])
    try:
        path = site_config.load_site_config(None).core_bundle
        if path is not None:
            return load_bundle(path, BUNDLE_TASKS_DIGESTS[name])
    except NextTransformerError as problem:
        raise Needs(f"Needs the CORE bundle of a site file: {problem}", "--deep") from None
    raise Needs("Needs the CORE bundle: set 'core_bundle' in the site file.", "--deep")


def _core(view: RunView, model: Decoder, tokenizer: Tokenizer, device: torch.device) -> Iterator[Finding]:
    protocol = view.reference.protocol
    name = evaluation_name("core", protocol.core_updates()[-1])
    recorded, bundle = view.evaluations[name].get().core, _open_bundle(view)
    rules = PromptRules(
        context_tokens=protocol.context_tokens, max_prompt_tokens=protocol.core_max_prompt_tokens, is_strict=False
    )
    prepared = prepare_core(bundle, tokenizer, rules)
    if recorded is None or [task.label for task in recorded.tasks] != [task.label for task in bundle.tasks]:
        yield unjudged("Needs a whole CORE result; see E3.", f"{name} core")
        return
    # Shots are drawn from all rows; only the first rows are scored.
    slices = [
        dataclasses.replace(task, num_rows=min(NUM_CORE_ROWS, task.num_rows), questions=task.questions[:NUM_CORE_ROWS])
        for task in prepared
    ]
    result = score_core(
        model,
        bundle,
        slices,
        pad_id=tokenizer.bos_id,
        device=device,
        batch_tokens=protocol.core_batch_tokens,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
    )
    assert result is not None
    num_rows = num_flipped = 0
    for found, task in zip(result.tasks, recorded.tasks, strict=True):
        bits = correct_bits(task)
        if found.is_correct is None or bits is None:
            yield unjudged(f"CORE task {task.label} cannot be compared; see E3.", f"{name} core")
            continue
        num_rows += len(found.is_correct)
        num_flipped += int((found.is_correct != bits[: len(found.is_correct)]).sum())
    if num_flipped > MAX_FLIPPED_FRACTION * num_rows:
        wanted = f"at most {MAX_FLIPPED_FRACTION:.0%} of {num_rows} decisions"
        yield warning(
            "CORE decisions made again on this machine differ.",
            f"{name} core",
            expected=wanted,
            got=f"{num_flipped} flipped",
        )
