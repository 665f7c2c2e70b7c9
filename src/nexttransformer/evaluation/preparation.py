"""Encodes all CORE tasks, in this process or in workers. Imports no torch, so that workers start quickly."""

from dataclasses import dataclass

from nexttransformer.data.workers import Workers
from nexttransformer.evaluation.bundle import Bundle, Row, Task
from nexttransformer.evaluation.failures import describe
from nexttransformer.evaluation.prompts import check_enough_rows, evaluation_rows
from nexttransformer.evaluation.questions import PromptRules, TaskQuestions, TextEncoder, make_questions


@dataclass(frozen=True)
class _Job:
    """One task to encode, in this process or in a worker."""

    number: int
    task: Task
    rows: list[Row] | None
    encoder: TextEncoder
    rules: PromptRules
    limit: int | None

    def run(self) -> TaskQuestions:
        """Makes the task's questions; a failure becomes its error."""
        if self.rows is None:
            return TaskQuestions(num_rows=0, error=f"{self.task.file} is missing")
        rows = evaluation_rows(self.rows, self.limit)
        try:
            return make_questions(self.number, self.task, rows, self.encoder, self.rules)
        except Exception as problem:  # noqa: BLE001 - becomes the error of its task, and CORE is null
            return TaskQuestions(num_rows=len(rows), error=describe(problem))


def prepare_core(
    bundle: Bundle, encoder: TextEncoder, rules: PromptRules, *, limit: int | None = None, num_workers: int = 1
) -> list[TaskQuestions]:
    """Makes the questions of all tasks, in bundle order. A task that fails carries its error and no questions.

    Args:
        bundle: the bundle.
        encoder: the tokenizer; picklable if there are several workers.
        rules: how prompts become questions.
        limit: rows per task.
        num_workers: processes to encode in.

    Raises:
        ConfigError: if `limit` leaves a task with too few rows for its shots.
    """
    check_enough_rows(bundle.tasks, limit)
    jobs = [
        _Job(number, task, bundle.rows.get(task.file), encoder, rules, limit)
        for number, task in enumerate(bundle.tasks)
    ]
    # Largest first, so that no worker is left with a large one at the end.
    jobs.sort(key=lambda job: -sum(len(str(row)) for row in job.rows or []))
    with Workers(num_workers) as workers:
        made = list(workers.map(_Job.run, jobs))
    numbers = {job.number: place for place, job in enumerate(jobs)}
    return [made[numbers[number]] for number in range(len(jobs))]
