"""CORE rows as token ids: encoding by block, spans to score, and the counts reported per task."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from nexttransformer.errors import DataError
from nexttransformer.evaluation import prompts
from nexttransformer.evaluation.bundle import LANGUAGE_MODELING, MULTIPLE_CHOICE, SCHEMA, Row, Task

Ids = np.ndarray


class TextEncoder(Protocol):
    """What CORE needs of a tokenizer: ordinary text to ids, and the id that opens a prompt."""

    @property
    def bos_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """One row, ready to be scored. Positions count from 0 = BOS.

    Attributes:
        task, index: where the answer belongs: task number and row in evaluation order.
        kind: the task's kind.
        gold: index of the right option (0 for language modeling, which has one prompt).
        head: id arrays that all prompts of the row begin with (BOS and shots).
        num_head_tokens: their total length.
        tails: per option, the ids after the head.
        spans: per option, half-open [start, end): the tokens to score.
        num_shared_tokens: tokens that all options share and that no span begins before.
    """

    task: int
    index: int
    kind: str
    gold: int
    head: tuple[Ids, ...]
    num_head_tokens: int
    tails: tuple[Ids, ...]
    spans: tuple[tuple[int, int], ...]
    num_shared_tokens: int

    def num_tokens(self, option: int) -> int:
        """Length of one prompt, BOS included."""
        return self.num_head_tokens + len(self.tails[option])

    def ids(self, option: int) -> Ids:
        """Returns the whole prompt of one option, int32."""
        return np.concatenate((*self.head, self.tails[option]))

    @property
    def has_letter_spans(self) -> bool:
        """Whether all options can be read from the logits after the common prefix (one token each)."""
        return self.kind == MULTIPLE_CHOICE and all(end - start == 1 for start, end in self.spans)


@dataclass
class TaskQuestions:
    """All questions of a task and what has to be counted while making them. `error` means: no questions."""

    num_rows: int
    questions: list[Question] = field(default_factory=list)
    num_prompts: int = 0
    max_prompt_tokens: int = 0
    num_beyond_context: int = 0
    num_cut: int = 0
    num_prefix_fallbacks: int = 0
    num_empty_spans: int = 0
    error: str | None = None


@dataclass(frozen=True)
class PromptRules:
    """How prompts become questions.

    Attributes:
        context_tokens: prompts longer than this are counted (and still given whole).
        max_prompt_tokens: a longer prompt fails its task.
        is_strict: whether a row that needs the prefix fallback fails its task (formal evaluations).
        model_limit_tokens: only for foreign models with a hard limit: keep this many last tokens.
        by_block: encode shots once; exact for tokenizers that always cut after a blank line.
    """

    context_tokens: int
    max_prompt_tokens: int
    is_strict: bool
    model_limit_tokens: int | None = None
    by_block: bool = True


def make_questions(number: int, task: Task, rows: list[Row], encoder: TextEncoder, rules: PromptRules) -> TaskQuestions:
    """Encodes a task's rows (in evaluation order) and finds the spans to score."""
    result = TaskQuestions(num_rows=len(rows))
    bos = np.array([encoder.bos_id], dtype=np.int32)
    for index, (head, tails) in enumerate(_encode(task, rows, encoder, rules)):
        result.num_prompts += len(tails)
        question = _question(number, index, task.kind, rows[index], (bos, *head), tails, result)
        lengths = [question.num_tokens(option) for option in range(len(question.tails))]
        result.max_prompt_tokens = max(result.max_prompt_tokens, *lengths)
        result.num_beyond_context += sum(length > rules.context_tokens for length in lengths)
        if rules.model_limit_tokens is not None and max(lengths) > rules.model_limit_tokens:
            question = _cut(question, rules.model_limit_tokens, result)
        result.questions.append(question)
    if result.max_prompt_tokens > rules.max_prompt_tokens:
        result.error = (
            f"longest prompt has {result.max_prompt_tokens} tokens, at most {rules.max_prompt_tokens} allowed"
        )
    elif rules.is_strict and result.num_prefix_fallbacks:
        result.error = (
            f"{result.num_prefix_fallbacks} rows whose prompt without the answer is no token prefix of the one with it"
        )
    if result.error is not None:
        result.questions = []
    return result


def _encode(task: Task, rows: list[Row], encoder: TextEncoder, rules: PromptRules) -> list[tuple[list[Ids], list[Ids]]]:
    """Returns per row the id arrays of its shots (empty if prompts were encoded whole) and of its prompts' ends."""
    shots = [prompts.shot_text(task, row) for row in rows] if task.num_fewshot else []
    ends = [prompts.question_texts(task, row) for row in rows]
    if task.kind == LANGUAGE_MODELING:
        ends = [[without.strip(), with_answer] for without, with_answer in ends]
    starts = [*shots, *(text for texts in ends for text in texts)]
    # A piece boundary always follows a blank line when the next block starts with a non-space.
    if rules.by_block and all(text and not text[0].isspace() for text in starts):
        shot_ids = _encode_all(encoder, shots)
        heads = [
            [shot_ids[other] for other in prompts.shot_indices(index, len(rows), task.num_fewshot)]
            for index in range(len(rows))
        ]
    else:
        ends = [prompts.prompts(task, rows, index) for index in range(len(rows))]
        heads = [[] for _ in rows]
    end_ids = iter(_encode_all(encoder, [text for texts in ends for text in texts]))
    return [(head, [next(end_ids) for _ in texts]) for head, texts in zip(heads, ends, strict=True)]


def _encode_all(encoder: TextEncoder, texts: list[str]) -> list[Ids]:
    return [np.array(encoder.encode(text), dtype=np.int32) for text in texts]


def _question(
    number: int, index: int, kind: str, row: Row, head: tuple[Ids, ...], tails: list[Ids], result: TaskQuestions
) -> Question:
    """Finds the spans of one row and counts fallbacks and empty spans."""
    num_head = sum(len(part) for part in head)
    ends = [num_head + len(tail) for tail in tails]
    shared = num_head + _num_common(tails)
    if kind == LANGUAGE_MODELING:
        if shared < ends[0]:
            result.num_prefix_fallbacks += 1
        if shared >= ends[1]:
            raise DataError(f"row {index}: the answer adds no token to its prompt.")
        spans, tails, gold = [(shared, ends[1])], tails[1:], 0
    elif kind == SCHEMA:
        whole = [np.concatenate((*head, tail)) for tail in tails]
        # BOS is never predicted, so a span starts at 1 or later.
        suffix = min(_num_common([ids[::-1] for ids in whole]), min(ends) - 1)
        spans, gold = [(end - suffix, end) for end in ends], row["gold"]
    else:
        spans, gold = [(shared, end) for end in ends], row["gold"]
        result.num_empty_spans += sum(start == end for start, end in spans)
    shared = min(shared, *(start for start, _ in spans))
    return Question(number, index, kind, gold, head, num_head, tuple(tails), tuple(spans), shared)


def _num_common(sequences: list[Ids]) -> int:
    """Length of the longest common prefix of some id sequences."""
    first, length = sequences[0], min(len(ids) for ids in sequences)
    for other in sequences[1:]:
        differing = np.flatnonzero(first[:length] != other[:length])
        length = int(differing[0]) if len(differing) else length
    return length


def _cut(question: Question, limit_tokens: int, result: TaskQuestions) -> Question:
    """Keeps the last tokens of a row's prompts, for a model that cannot read more; nothing stays shared."""
    tails, spans = [], []
    for option, (start, end) in enumerate(question.spans):
        ids = question.ids(option)
        surplus = max(len(ids) - limit_tokens, 0)
        if start - surplus < 1:
            raise DataError(f"row {question.index}: the answer does not fit into {limit_tokens} tokens.")
        result.num_cut += surplus > 0
        tails.append(ids[surplus:])
        spans.append((start - surplus, end - surplus))
    return Question(question.task, question.index, question.kind, question.gold, (), 0, tuple(tails), tuple(spans), 0)
