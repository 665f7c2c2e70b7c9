"""Canonical CORE batches: which rows run together, and their id tensors. A function of rows and budget alone.

Three forms of a row. *Letters*: one sequence, the common prefix; all options are read from its last logits.
*Whole*: every prompt runs on its own. *Options*: the common prefix runs once, its state is copied per option.
Letter here: S sequences.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nexttransformer.evaluation.bundle import LANGUAGE_MODELING
from nexttransformer.evaluation.questions import Ids, Question

SHARED_PATH = "shared"
PLAIN_PATH = "plain"

# Sequence lengths are rounded up to a multiple of this, to keep the number of distinct shapes small.
PAD_MULTIPLE_TOKENS = 8


@dataclass(frozen=True)
class Batch:
    """Questions that run together; `num_prefix_tokens` run once per question before its options (0: none)."""

    questions: tuple[Question, ...]
    num_prefix_tokens: int
    path: str

    @property
    def num_padded_tokens(self) -> int:
        """Tokens the model runs, padding included."""
        lengths = [length for question in self.questions for length in _lengths(question, self.path)]
        rest = _rounded(max(lengths) - self.num_prefix_tokens)
        return len(self.questions) * self.num_prefix_tokens + len(lengths) * rest

    def halves(self) -> tuple["Batch", "Batch"]:
        """Splits the batch after a failed allocation; the prefix of each half may grow."""
        middle = len(self.questions) // 2
        first, second = (_make_batch(part, self.path) for part in (self.questions[:middle], self.questions[middle:]))
        return first, second


@dataclass(frozen=True)
class BatchArrays:
    """A batch as arrays.

    Attributes:
        prefix_ids: [questions, prefix] int64, or None.
        owners: [S] int64, the question of each sequence.
        ids_ST: [S, T] int64, the rest of each sequence, padded on the right with BOS.
        positions: [P] int64, flat indices into S x T whose logits are read.
        targets: [P] int64, the id each of them should predict.
        segments: [P] int64, the prompt (option) each of them belongs to, counted over the whole batch.
        is_greedy: [P] bool, positions whose argmax is asked for (language modeling).
    """

    prefix_ids: np.ndarray | None
    owners: np.ndarray
    ids_ST: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    is_greedy: np.ndarray


def make_batches(questions: Iterable[Question], budget_tokens: int, path: str) -> list[Batch]:
    """Returns the canonical batches, largest first.

    Args:
        questions: the rows of all tasks, in any order.
        budget_tokens: padded tokens per batch; a row that needs more is a batch of its own.
        path: `shared` or `plain`.
    """
    whole, options = [], []
    for question in questions:
        (options if _prefix_tokens(question, path) > 0 else whole).append(question)
    whole.sort(key=lambda each: (-max(_lengths(each, path)), each.task, each.index))
    options.sort(key=lambda each: (-each.num_shared_tokens, each.task, each.index))
    return [_make_batch(tuple(group), path) for part in (whole, options) for group in _fill(part, budget_tokens, path)]


def make_arrays(batch: Batch, *, pad_id: int, num_extra_columns: int = 0) -> BatchArrays:
    """Lays a batch out as arrays.

    Args:
        batch: the batch.
        pad_id: BOS; it always stands behind every real token of its row.
        num_extra_columns: more padding, for tests that show it changes nothing.
    """
    prefix = batch.num_prefix_tokens
    sequences: list[Ids] = []
    owners: list[int] = []
    positions, targets, segments, greedy = [], [], [], []
    num_segments = 0
    for number, question in enumerate(batch.questions):
        is_letters = _is_letters(question, batch.path)
        prompts = [question.ids(option) for option in range(len(question.tails))]
        for option, (ids, (start, end)) in enumerate(zip(prompts, question.spans, strict=True)):
            if option == 0 or not is_letters:
                sequences.append(ids[prefix:start] if is_letters else ids[prefix:])
                owners.append(number)
            for position in range(start, end):
                positions.append((len(sequences) - 1, position - 1 - prefix))
                targets.append(ids[position])
                segments.append(num_segments)
                greedy.append(question.kind == LANGUAGE_MODELING)
            num_segments += 1
    columns = _rounded(max(len(ids) for ids in sequences)) + num_extra_columns
    ids_ST = np.full((len(sequences), columns), pad_id, dtype=np.int64)
    for row, ids in enumerate(sequences):
        ids_ST[row, : len(ids)] = ids
    flat = np.array(positions, dtype=np.int64).reshape(-1, 2)
    return BatchArrays(
        prefix_ids=np.stack([each.ids(0)[:prefix] for each in batch.questions]).astype(np.int64) if prefix else None,
        owners=np.array(owners, dtype=np.int64),
        ids_ST=ids_ST,
        positions=flat[:, 0] * columns + flat[:, 1],
        targets=np.array(targets, dtype=np.int64),
        segments=np.array(segments, dtype=np.int64),
        is_greedy=np.array(greedy, dtype=bool),
    )


def _is_letters(question: Question, path: str) -> bool:
    return path == SHARED_PATH and question.has_letter_spans


def _prefix_tokens(question: Question, path: str) -> int:
    """Tokens of a row that may run once for all options; the last shared one predicts the first difference."""
    if path == PLAIN_PATH or len(question.tails) == 1 or _is_letters(question, path):
        return 0
    return max(question.num_shared_tokens - 1, 0)


def _lengths(question: Question, path: str) -> list[int]:
    """Tokens of each sequence a row needs."""
    if _is_letters(question, path):
        return [question.spans[0][0]]
    return [question.num_tokens(option) for option in range(len(question.tails))]


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // PAD_MULTIPLE_TOKENS) * PAD_MULTIPLE_TOKENS


def _make_batch(questions: tuple[Question, ...], path: str) -> Batch:
    return Batch(questions, min(_prefix_tokens(question, path) for question in questions), path)


def _fill(questions: list[Question], budget_tokens: int, path: str) -> Iterator[list[Question]]:
    """Cuts a sorted list greedily, so that the padded tokens of each group stay within the budget."""
    group: list[Question] = []
    num_sequences = longest = 0
    for question in questions:
        lengths = _lengths(question, path)
        prefix = _prefix_tokens(question, path)
        rest = _rounded(max(longest, *lengths) - prefix)
        if group and (len(group) + 1) * prefix + (num_sequences + len(lengths)) * rest > budget_tokens:
            yield group
            group, num_sequences, longest = [], 0, 0
        group.append(question)
        num_sequences += len(lengths)
        longest = max(longest, *lengths)
    if group:
        yield group
