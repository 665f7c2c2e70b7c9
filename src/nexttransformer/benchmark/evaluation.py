"""Speed of evaluation: validation rows and CORE batches through the code that scores runs."""

import re
import time
import zlib
from typing import Any

import numpy as np

from nexttransformer import protocol as protocols
from nexttransformer.benchmark.options import BenchOptions
from nexttransformer.benchmark.rows import SyntheticRows
from nexttransformer.benchmark.subject import Subject
from nexttransformer.benchmark.timing import peak_memory, reset_peak_memory, synchronize
from nexttransformer.errors import RunFailure
from nexttransformer.evaluation.batches import SHARED_PATH, Batch, make_batches
from nexttransformer.evaluation.bpb import Rows, score_split
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, load_bundle
from nexttransformer.evaluation.inputs import EvaluationInputs, open_inputs
from nexttransformer.evaluation.preparation import prepare_core
from nexttransformer.evaluation.questions import PromptRules, Question
from nexttransformer.evaluation.runner import BatchRunner
from nexttransformer.evaluation.scoring import CURVE_SPLIT
from nexttransformer.models.layers import cached_weights

# Passes of validation rows and batches of CORE that are timed per process.
_NUM_PASSES = {"cuda": 10, "cpu": 2}
_NUM_BATCHES = {"cuda": 40, "cpu": 1}
_WORD = re.compile(r"\s?\w{1,5}|\s?[^\w\s]|\s")


class StandInTokenizer:
    """Ids for text where no tokenizer is at hand: about as many as a real one gives, of no meaning."""

    def __init__(self, vocab_size: int) -> None:
        self.bos_id = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """Returns one id per word of up to five letters, separator included, or mark."""
        return [zlib.crc32(word.encode()) % self.bos_id for word in _WORD.findall(text)]


def measure_evaluation(subject: Subject, options: BenchOptions, micro_batch: int) -> dict[str, Any]:
    """Times validation rows and a systematic sample of CORE batches; calculates the full passes. Collective."""
    model, world, protocol = subject.model, subject.world, subject.protocol
    inputs = None
    if options.site is not None:
        has_bundle = protocol.core_bundle == protocols.EXCERPT_BUNDLE or options.site.core_bundle is not None
        inputs = open_inputs(options.site, protocol, splits=(CURVE_SPLIT,), want_core=has_bundle)
    model.eval()
    reset_peak_memory(world.device)
    try:
        with cached_weights(model):
            reader: Rows = SyntheticRows(protocol, num_rows=protocol.val_curve_rows)
            lengths = np.ones(protocol.vocab_size, dtype=np.int32)
            if inputs is not None:
                reader, lengths = inputs.readers[CURVE_SPLIT], inputs.tokenizer.byte_lengths
            curve = _validation(subject, reader, lengths, micro_batch)
            core = _core(subject, inputs)
    finally:
        model.train()
    return {
        "rows": "prepared" if inputs is not None else "synthetic",
        "validation": curve,
        "core": core,
        "peak_memory_bytes": peak_memory(world.device),
    }


def _validation(subject: Subject, reader: Rows, byte_lengths: np.ndarray, micro_batch: int) -> dict[str, Any]:
    world, protocol = subject.world, subject.protocol

    def score(num_rows: int) -> float:
        synchronize(world.device)
        start = time.perf_counter()
        score_split(
            subject.model,
            reader,
            byte_lengths,
            split=CURVE_SPLIT,
            device=world.device,
            micro_batch=micro_batch,
            rank=world.rank,
            world_size=world.world_size,
            gather=world.control.gather_objects,
            num_rows=num_rows,
        )
        return time.perf_counter() - start

    one_pass = world.world_size * micro_batch
    score(one_pass)
    num_rows = min(_NUM_PASSES[world.device.type] * one_pass, reader.num_rows)
    seconds = score(num_rows)
    rate = num_rows * protocol.context_tokens / seconds
    return {
        "num_rows": num_rows,
        "seconds": seconds,
        "tokens_per_second": rate,
        "val_curve_seconds": protocol.val_curve_rows * protocol.context_tokens / rate,
    }


def _questions(protocol: protocols.Protocol, inputs: EvaluationInputs | None) -> tuple[str, list[Question]]:
    """Returns CORE's questions and their origin: the site's bundle, else the shipped excerpt with stand-in ids."""
    if inputs is not None and inputs.bundle is not None:
        name = "excerpt" if inputs.bundle.is_excerpt else "full"
        prepared = inputs.core_questions(limit=None, is_strict=False)
    else:
        name = "excerpt, stand-in ids"
        bundle = load_bundle(EXCERPT_FOLDER, protocols.BUNDLE_TASKS_DIGESTS[protocols.EXCERPT_BUNDLE])
        rules = PromptRules(
            context_tokens=protocol.context_tokens, max_prompt_tokens=protocol.core_max_prompt_tokens, is_strict=False
        )
        prepared = prepare_core(bundle, StandInTokenizer(protocol.vocab_size), rules)
    return name, [question for task in prepared for question in task.questions]


def _core(subject: Subject, inputs: EvaluationInputs | None) -> dict[str, Any]:
    world, protocol = subject.world, subject.protocol
    name, questions = _questions(protocol, inputs)
    batches = make_batches(questions, protocol.core_batch_tokens, SHARED_PATH)
    total_tokens = sum(batch.num_padded_tokens for batch in batches)
    wanted = _NUM_BATCHES[world.device.type] * world.world_size
    # Every k-th of the batches, which are sorted by size: large and small ones in proportion.
    stride = max(1, len(batches) // wanted)
    sample = batches[stride // 2 :: stride][:wanted]
    own = sample[world.rank :: world.world_size]
    runner = BatchRunner(subject.model, world.device, pad_id=protocol.vocab_size - 1)

    def run(some: list[Batch]) -> None:
        failures = [scores for _, scores in runner.run(some) if isinstance(scores, str)]
        if failures:
            raise RunFailure(f"CORE batch: {failures[0]}")

    run(own[:1])
    synchronize(world.device)
    start = time.perf_counter()
    run(own)
    synchronize(world.device)
    seconds = time.perf_counter() - start
    gathered = world.control.gather_objects(seconds)
    seconds = world.control.broadcast_object(None if gathered is None else max(gathered))
    tokens = sum(batch.num_padded_tokens for batch in sample)
    return {
        "bundle": name,
        "num_batches": len(sample),
        "padded_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "bundle_padded_tokens": total_tokens,
        "bundle_seconds": total_tokens * seconds / tokens,
    }
