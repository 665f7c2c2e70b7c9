"""CORE: deals the canonical batches to processes, decides every row exactly once, merges the answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nexttransformer.evaluation.batches import SHARED_PATH, make_batches
from nexttransformer.evaluation.bundle import Bundle
from nexttransformer.evaluation.core_result import CoreResult, TaskResult
from nexttransformer.evaluation.decisions import Answer, decide
from nexttransformer.evaluation.progress import Progress
from nexttransformer.evaluation.questions import TaskQuestions
from nexttransformer.evaluation.runner import BatchRunner, StatefulModel

UNANSWERED = -1


@dataclass
class _RankAnswers:
    """What one process found: per task an array of -1, 0, 1 over its rows, near ties and the first error."""

    answers: list[np.ndarray]
    num_near_ties: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    num_split_batches: int = 0

    def record(self, answer: Answer) -> None:
        """Stores a row's answer; a second one for the same row is an error of its task."""
        if self.answers[answer.task][answer.index] != UNANSWERED:
            self.errors.setdefault(answer.task, f"row {answer.index} was answered twice")
        if answer.error is not None:
            self.errors.setdefault(answer.task, answer.error)
        self.answers[answer.task][answer.index] = answer.is_correct
        self.num_near_ties[answer.task] += int(answer.is_near_tie)


def score_core(
    model: StatefulModel,
    bundle: Bundle,
    prepared: list[TaskQuestions],
    *,
    pad_id: int,
    device: torch.device,
    batch_tokens: int,
    rank: int,
    world_size: int,
    gather: Callable[[Any], list[Any] | None],
    limit: int | None = None,
    path: str = SHARED_PATH,
    num_extra_columns: int = 0,
    progress: Progress | None = None,
) -> CoreResult | None:
    """Scores CORE. Every process calls it; the result is on rank 0, None elsewhere.

    Args:
        model: in eval mode, weights on `device`.
        bundle: the bundle of `prepared`.
        prepared: from `prepare_core`, equal on all processes.
        pad_id: BOS.
        device: where to run.
        batch_tokens: padded tokens per canonical batch.
        rank, world_size: process p takes batches p, p + W, ...
        gather: collects one object per process on rank 0 (None elsewhere).
        limit: what `prepared` was limited to, for the record.
        path: `shared` (formal) or `plain` (every prompt whole; for comparison).
        num_extra_columns: more padding; a test shows that it changes no answer.
        progress: told about every finished batch.
    """
    questions = [question for task in prepared for question in task.questions]
    batches = make_batches(questions, batch_tokens, path)[rank::world_size]
    own = _RankAnswers(
        answers=[np.full(task.num_rows, UNANSWERED, dtype=np.int8) for task in prepared],
        num_near_ties=[0] * len(prepared),
    )
    runner = BatchRunner(model, device, pad_id=pad_id, num_extra_columns=num_extra_columns)
    labels = [task.label for task in bundle.tasks]
    if progress is not None:
        rows = (labels[question.task] for batch in batches for question in batch.questions)
        progress.start(sum(batch.num_padded_tokens for batch in batches), rows)
    for batch, scores in runner.run(batches):
        if isinstance(scores, str):
            for task in {question.task for question in batch.questions}:
                own.errors.setdefault(task, scores)
        else:
            for answer in decide(batch.questions, scores):
                own.record(answer)
        if progress is not None:
            progress.advance(batch.num_padded_tokens, (labels[question.task] for question in batch.questions))
    if progress is not None:
        progress.stop()
    own.num_split_batches = runner.num_split_batches
    gathered = gather(own)
    if gathered is None:
        return None
    return CoreResult(
        tasks=_merge(bundle, prepared, gathered),
        is_excerpt=bundle.is_excerpt,
        bundle_digest=bundle.digest,
        limit=limit,
        path=path,
        batch_tokens=batch_tokens,
        num_split_batches=sum(each.num_split_batches for each in gathered),
    )


def _merge(bundle: Bundle, prepared: list[TaskQuestions], gathered: list[_RankAnswers]) -> list[TaskResult]:
    """Joins the answers of all processes; every row must have exactly one."""
    results = []
    for number, (task, made) in enumerate(zip(bundle.tasks, prepared, strict=True)):
        answers = np.stack([each.answers[number] for each in gathered])
        counts = (answers != UNANSWERED).sum(axis=0)
        error = made.error or next((each.errors[number] for each in gathered if number in each.errors), None)
        if error is None and (counts != 1).any():
            row = int(np.flatnonzero(counts != 1)[0])
            error = f"row {row} was answered {counts[row]} times, expected once"
        results.append(
            TaskResult(
                task=task,
                made=made,
                is_correct=None if error else answers.max(axis=0) == 1,
                num_near_ties=sum(each.num_near_ties[number] for each in gathered),
                error=error,
            )
        )
    return results
