"""What CORE found: per task counts and accuracies, the two means, and their JSON form."""

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nexttransformer.evaluation.bundle import Task
from nexttransformer.evaluation.questions import TaskQuestions

NUM_TASKS = 22


def centered(accuracy: float, baseline_percent: float) -> float:
    """Rescales an accuracy (fraction) so that its baseline (percent) is 0 and perfection 1."""
    return (accuracy - baseline_percent / 100) / (1 - baseline_percent / 100)


@dataclass(frozen=True)
class TaskResult:
    """One task's outcome. `is_correct` [rows] bool in evaluation order; None with an `error`."""

    task: Task
    made: TaskQuestions
    is_correct: np.ndarray | None
    num_near_ties: int
    error: str | None

    @property
    def num_correct(self) -> int | None:
        """Rows answered correctly."""
        return None if self.is_correct is None else int(self.is_correct.sum())

    @property
    def accuracy(self) -> float | None:
        """Rows answered correctly / rows."""
        return None if self.num_correct is None else self.num_correct / self.made.num_rows

    def centered(self, baseline_percent: float) -> float | None:
        """The centered accuracy for one of the two baselines."""
        return None if self.accuracy is None else centered(self.accuracy, baseline_percent)

    def to_json(self) -> dict[str, Any]:
        """Returns the task's entry of a result file."""
        bits = (
            None
            if self.is_correct is None
            else base64.b64encode(np.packbits(self.is_correct).tobytes()).decode("ascii")
        )
        return {
            "label": self.task.label,
            "rows": self.made.num_rows,
            "num_fewshot": self.task.num_fewshot,
            "num_correct": self.num_correct,
            "accuracy": self.accuracy,
            "baseline_v1": self.task.baseline_v1,
            "baseline_v2": self.task.baseline_v2,
            "centered_v1": self.centered(self.task.baseline_v1),
            "centered_v2": self.centered(self.task.baseline_v2),
            "num_prompts": self.made.num_prompts,
            "max_prompt_tokens": self.made.max_prompt_tokens,
            "num_beyond_context": self.made.num_beyond_context,
            "num_cut": self.made.num_cut,
            "num_prefix_fallbacks": self.made.num_prefix_fallbacks,
            "num_empty_spans": self.made.num_empty_spans,
            "num_near_ties": self.num_near_ties,
            "correct_bits": bits,
            "error": self.error,
        }


@dataclass(frozen=True)
class CoreResult:
    """All tasks. `limit` is rows per task or None; an excerpt bundle counts as limited too."""

    tasks: list[TaskResult]
    is_excerpt: bool
    bundle_digest: str
    limit: int | None
    path: str
    batch_tokens: int
    num_split_batches: int

    @property
    def errors(self) -> list[str]:
        """One line per failed task; any of them means that there is no CORE value."""
        found = [f"{each.task.label}: {each.error}" for each in self.tasks if each.error is not None]
        if len(self.tasks) != NUM_TASKS:
            found.append(f"{len(self.tasks)} tasks, expected {NUM_TASKS}")
        return found

    def _mean(self, baseline: str) -> float | None:
        """Mean centered accuracy over the tasks, or None if any failed."""
        if self.errors:
            return None
        return math.fsum(each.to_json()[f"centered_{baseline}"] for each in self.tasks) / NUM_TASKS

    @property
    def is_limited(self) -> bool:
        """Whether these are not all rows of CORE."""
        return self.is_excerpt or self.limit is not None

    @property
    def core_v1(self) -> float | None:
        """CORE with nanochat's baselines; None unless complete."""
        return None if self.is_limited else self._mean("v1")

    @property
    def core_v2(self) -> float | None:
        """CORE with DCLM's corrected baselines; None unless complete."""
        return None if self.is_limited else self._mean("v2")

    @property
    def core_limited(self) -> float | None:
        """The v1 mean over limited rows; None for a complete evaluation."""
        return self._mean("v1") if self.is_limited else None

    def to_json(self, *, tokenizer_digest: str) -> dict[str, Any]:
        """Returns the `core` part of a result file."""
        return {
            "core_v1": self.core_v1,
            "core_v2": self.core_v2,
            "core_limited": self.core_limited,
            "limit": self.limit,
            "bundle_digest": self.bundle_digest,
            "tokenizer_digest": tokenizer_digest,
            "path": self.path,
            "batch_tokens": self.batch_tokens,
            "num_split_batches": self.num_split_batches,
            "tasks": [each.to_json() for each in self.tasks],
        }
