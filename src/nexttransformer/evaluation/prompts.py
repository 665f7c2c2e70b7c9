"""Which shots a CORE row gets, and the text of its prompts. Pure functions of rows; no tokens here.

Source: karpathy/nanochat nanochat/core_eval.py at 92d63d4 (sampling, templates and strips are equal).
"""

import random

from nexttransformer.errors import ConfigError
from nexttransformer.evaluation.bundle import LANGUAGE_MODELING, MULTIPLE_CHOICE, Row, Task

SHUFFLE_SEED = 1337
SHOT_SEED = 1234
SHOT_END = "\n\n"


def evaluation_rows(rows: list[Row], limit: int | None = None) -> list[Row]:
    """Returns the rows in evaluation order: shuffled with a fixed seed, then cut to the first `limit`."""
    order = list(rows)
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order if limit is None else order[:limit]


def check_enough_rows(tasks: tuple[Task, ...], limit: int | None) -> None:
    """Refuses a limit that leaves a task without enough rows for its shots.

    Raises:
        ConfigError: if a task would have no more rows than shots; shots are never fewer than stated.
    """
    for task in tasks:
        num_rows = task.num_rows if limit is None else min(limit, task.num_rows)
        if num_rows <= task.num_fewshot:
            raise ConfigError(
                f"--limit {limit}: {task.label} would have {num_rows} rows for {task.num_fewshot} shots and a question."
                f" Expected at least {max(each.num_fewshot for each in tasks) + 1}."
            )


def shot_indices(index: int, num_rows: int, num_fewshot: int) -> list[int]:
    """Returns the evaluation-order indices of a row's shots, in the order in which they are shown.

    Equals `random.Random(1234 + index).sample(all other indices, num_fewshot)` without building that list.
    """
    if num_fewshot == 0:
        return []
    drawn = random.Random(SHOT_SEED + index).sample(range(num_rows - 1), num_fewshot)
    return [other + 1 if other >= index else other for other in drawn]


def shot_text(task: Task, row: Row) -> str:
    """Returns a row as a solved example, closed by a blank line."""
    if task.kind == MULTIPLE_CHOICE:
        return row["query"] + task.delimiter + row["choices"][row["gold"]] + SHOT_END
    if task.kind == LANGUAGE_MODELING:
        return row["context"].strip() + task.delimiter + row["continuation"] + SHOT_END
    return row["context_options"][row["gold"]] + task.delimiter + row["continuation"] + SHOT_END


def question_texts(task: Task, row: Row) -> list[str]:
    """Returns what follows the shots: one text per option; for language modeling, without and with the answer.

    The text without the answer is not trimmed yet: see `prompts`.
    """
    if task.kind == MULTIPLE_CHOICE:
        return [row["query"] + task.delimiter + choice for choice in row["choices"]]
    if task.kind == LANGUAGE_MODELING:
        context = row["context"].strip() + task.delimiter
        return [context, context + row["continuation"]]
    return [option + task.delimiter + row["continuation"] for option in row["context_options"]]


def prompts(task: Task, rows: list[Row], index: int) -> list[str]:
    """Returns all whole prompts of one row, in option order; language modeling: without, then with the answer.

    Args:
        task: the task.
        rows: its rows in evaluation order.
        index: the row.
    """
    shots = "".join(shot_text(task, rows[other]) for other in shot_indices(index, len(rows), task.num_fewshot))
    texts = [shots + text for text in question_texts(task, rows[index])]
    if task.kind == LANGUAGE_MODELING:
        texts[0] = texts[0].strip()
    return texts
