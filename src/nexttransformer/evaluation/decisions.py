"""From scores of span tokens to answers: the decision rules of CORE, and what counts as a near tie."""

from dataclasses import dataclass

import numpy as np

from nexttransformer.errors import DataError
from nexttransformer.evaluation.bundle import LANGUAGE_MODELING
from nexttransformer.evaluation.questions import Question

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class SpanScores:
    """What the model said about the span tokens of a batch.

    Attributes:
        segments: [P] int64, the prompt each token belongs to.
        nats: [P] float64, cross-entropy of each token.
        is_argmax: [P] bool, whether the token is the argmax (lowest id among equal maxima); language modeling only.
        lead: [P] float64, largest minus second largest logit; language modeling only.
    """

    segments: np.ndarray
    nats: np.ndarray
    is_argmax: np.ndarray
    lead: np.ndarray


@dataclass(frozen=True)
class Answer:
    """The outcome of one row."""

    task: int
    index: int
    is_correct: bool
    is_near_tie: bool
    error: str | None = None


def decide(questions: tuple[Question, ...], scores: SpanScores) -> list[Answer]:
    """Decides every row of a batch; a row with a score that is not finite carries an error."""
    answers = []
    bounds = np.searchsorted(scores.segments, np.arange(sum(len(each.spans) for each in questions) + 1))
    first = 0
    for question in questions:
        edges = bounds[first : first + len(question.spans) + 1]
        first += len(question.spans)
        try:
            rule = _decide_greedy if question.kind == LANGUAGE_MODELING else _decide_choice
            is_correct, is_near_tie = rule(question, scores, edges)
            answers.append(Answer(question.task, question.index, is_correct, is_near_tie))
        except DataError as problem:
            answers.append(Answer(question.task, question.index, False, False, str(problem)))
    return answers


def _decide_choice(question: Question, scores: SpanScores, edges: np.ndarray) -> tuple[bool, bool]:
    """Lowest mean nats wins, first index on exact ties; an empty option never wins unless it is option 0."""
    means = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        # An empty span has no mean; the reference's NaN comes first in `min` only at index 0.
        means.append(float(np.add.reduce(scores.nats[start:end])) / (end - start) if end > start else np.inf)
    filled = [mean for mean, start, end in zip(means, edges[:-1], edges[1:], strict=True) if end > start]
    if not np.isfinite(filled).all():
        raise DataError(f"row {question.index}: nats per token are not finite ({means}).")
    if edges[0] == edges[1]:
        return question.gold == 0, False
    best = sorted(filled)
    is_near_tie = len(best) > 1 and best[1] - best[0] < NEAR_TIE
    return means.index(best[0]) == question.gold, is_near_tie


def _decide_greedy(question: Question, scores: SpanScores, edges: np.ndarray) -> tuple[bool, bool]:
    """Correct iff every span token is the argmax given all before it."""
    span = slice(edges[0], edges[1])
    if not np.isfinite(scores.nats[span]).all() or not np.isfinite(scores.lead[span]).all():
        raise DataError(f"row {question.index}: logits are not finite.")
    return bool(scores.is_argmax[span].all()), bool((scores.lead[span] < NEAR_TIE).any())
