"""Bundles, tiny tasks and shortcuts that the CORE tests share."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nexttransformer.evaluation.bundle import LANGUAGE_MODELING, MULTIPLE_CHOICE, SCHEMA, Bundle, Task, load_bundle
from nexttransformer.evaluation.core import score_core
from nexttransformer.evaluation.core_result import CoreResult
from nexttransformer.evaluation.preparation import prepare_core
from nexttransformer.evaluation.questions import PromptRules
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, FULL_BUNDLE

BUNDLE_VARIABLE = "NEXTTRANSFORMER_CORE_BUNDLE"
RULES = PromptRules(context_tokens=2048, max_prompt_tokens=20_480, is_strict=True)
SPACE, ANSWER = " ", "\nAnswer: "

needs_bundle = pytest.mark.skipif(
    not os.environ.get(BUNDLE_VARIABLE), reason=f"{BUNDLE_VARIABLE} names no CORE bundle (only an excerpt is shipped)"
)


def full_bundle() -> Bundle:
    return load_bundle(Path(os.environ[BUNDLE_VARIABLE]), BUNDLE_TASKS_DIGESTS[FULL_BUNDLE])


def task(kind: str, *, label: str = "task", delimiter: str = SPACE, shots: int = 0, rows: int = 1) -> Task:
    return Task(label, kind, f"{label}.jsonl.gz", shots, delimiter, 0.0, 0.0, rows)


def bundle_of(*parts: tuple[Task, list[dict[str, Any]]]) -> Bundle:
    """A bundle in memory."""
    tasks = tuple(each for each, _ in parts)
    return Bundle("0" * 64, False, tasks, {each.file: rows for each, rows in parts})


def choice(query: str, choices: list[str], gold: int) -> dict[str, Any]:
    return {"query": query, "choices": choices, "gold": gold}


def mixed_bundle(num_rows: int = 13, num_shots: int = 3) -> Bundle:
    """Four tasks whose rows use all three forms of a batch, shots, and lengths from 10 to a few hundred bytes."""
    letters = [choice(f"Pick {'x' * (i % 5)} number {i}.\nAnswer:", ["A", "B", "C"], i % 3) for i in range(num_rows)]
    words = [
        choice(f"Item {i} {'is very ' * (i % 4)}big", [f"red {i}", "green", f"grey {i}{i}"], i % 3)
        for i in range(num_rows)
    ]
    schema = [
        {"context_options": [f"It hit {a}", f"It hit {b}"], "continuation": f"so {c} cried.", "gold": i % 2}
        for i, (a, b, c) in enumerate([("Ann", "Joan", "she"), ("Bo", "Al", "he"), ("Kim", "Tim", "Sam")])
    ]
    greedy = [{"context": f" Repeat ab{i}ab{i}ab{i} ", "continuation": f"ab{i}"} for i in range(num_rows)]
    return bundle_of(
        (task(MULTIPLE_CHOICE, label="letters", shots=num_shots, rows=num_rows), letters),
        (task(MULTIPLE_CHOICE, label="words", delimiter=ANSWER, shots=num_shots, rows=num_rows), words),
        (task(SCHEMA, label="schema", rows=3), schema),
        (task(LANGUAGE_MODELING, label="greedy", shots=num_shots, rows=num_rows), greedy),
    )


def score(model: Any, tokenizer: Any, bundle: Bundle, **options: Any) -> CoreResult:
    """Prepares and scores on the CPU; with `world_size` W, as W processes one after the other."""
    rules = options.pop("rules", RULES)
    world_size, limit = options.pop("world_size", 1), options.get("limit")
    prepared = prepare_core(bundle, tokenizer, rules, limit=limit)
    gathered: list[Any] = []
    result = None
    # Rank 0 last: by then it can "gather" what the others found.
    for rank in reversed(range(world_size)):

        def gather(own: Any, rank: int = rank) -> list[Any] | None:
            gathered.insert(0, own)
            return gathered if rank == 0 else None

        result = score_core(
            model,
            bundle,
            prepared,
            pad_id=tokenizer.bos_id,
            device=torch.device("cpu"),
            batch_tokens=options.get("batch_tokens", 16_384),
            rank=rank,
            world_size=world_size,
            gather=gather,
            **{name: value for name, value in options.items() if name != "batch_tokens"},
        )
    assert result is not None
    return result


def decisions(result: CoreResult) -> list[list[bool]]:
    assert not [each.error for each in result.tasks if each.error]
    return [[] if each.is_correct is None else each.is_correct.tolist() for each in result.tasks]


def write_bundle(folder: Path, files: dict[str, bytes], tasks: list[dict[str, Any]]) -> str:
    """Writes a bundle folder from unpacked rows and returns the digest of its `tasks.json`."""
    listing = {"tasks": tasks, "files": {}}
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        listing["files"][name] = {
            "file": f"{name}.gz",
            "rows": content.count(b"\n"),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    content = json.dumps(listing).encode()
    (folder / "tasks.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()
