"""Evaluations of a run as far as they can be read: values by kind and update, and the CORE table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nexttransformer import jsonio
from nexttransformer.errors import NextTransformerError
from nexttransformer.reporting.timeline import Timeline
from nexttransformer.reporting.tolerant import dig
from nexttransformer.training.events import Event, EventKey

Kind = Literal["val_curve", "core", "final", "standalone"]
KINDS = ("val_curve", "core", "final", "standalone")
CURVE_SPLIT, FINAL_SPLIT = "val_curve", "val_final"


@dataclass(frozen=True)
class CoreTask:
    """One of the 22 tasks; fractions, None where the task failed."""

    label: str
    rows: int
    num_fewshot: int
    num_correct: int | None
    accuracy: float | None
    centered_v1: float | None
    centered_v2: float | None
    baseline_v1: float | None
    error: str | None


@dataclass(frozen=True)
class Evaluation:
    """One result. `bpb` by split name; `core_limited` is a mean over an excerpt, never comparable with `core_v1`."""

    kind: str
    update: int
    source: str
    bpb: dict[str, float] = field(default_factory=dict)
    core_v1: float | None = None
    core_v2: float | None = None
    core_limited: float | None = None
    tasks: list[CoreTask] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    attempt: int | None = None
    seconds: float | None = None

    @property
    def has_core(self) -> bool:
        """Whether any CORE value is there."""
        return not (self.core_v1 is None and self.core_limited is None)


def parse_evaluation(value: Any, source: str) -> tuple[Evaluation | None, list[str]]:
    """Takes what can be read of an evaluation file; the second part says what could not."""
    kind, update = dig(value, "kind", str), dig(value, "update", int)
    if kind not in KINDS or update is None or update < 0:
        return None, [f"{source}: no evaluation: 'kind' or 'update' is missing or wrong."]
    problems = []
    bpb = {}
    for split in dig(value, "bpb", dict) or {}:
        score = dig(value, f"bpb.{split}.bpb", float)
        if score is None:
            problems.append(f"{source}: bpb.{split}.bpb is no number.")
        else:
            bpb[split] = score
    tasks = []
    for index, item in enumerate(dig(value, "core.tasks", list) or []):
        label = dig(item, "label", str)
        if label is None:
            problems.append(f"{source}: core.tasks.{index} has no label.")
            continue
        tasks.append(
            CoreTask(
                label=label,
                rows=dig(item, "rows", int) or 0,
                num_fewshot=dig(item, "num_fewshot", int) or 0,
                num_correct=dig(item, "num_correct", int),
                accuracy=dig(item, "accuracy", float),
                centered_v1=dig(item, "centered_v1", float),
                centered_v2=dig(item, "centered_v2", float),
                baseline_v1=dig(item, "baseline_v1", float),
                error=dig(item, "error", str),
            )
        )
    errors = [text for text in dig(value, "errors", list) or [] if isinstance(text, str)]
    result = Evaluation(
        kind=kind,
        update=update,
        source=source,
        bpb=bpb,
        core_v1=dig(value, "core.core_v1", float),
        core_v2=dig(value, "core.core_v2", float),
        core_limited=dig(value, "core.core_limited", float),
        tasks=tasks,
        errors=errors,
    )
    return result, problems


def read_evaluations(root: Path, events: list[Event], timeline: Timeline) -> tuple[list[Evaluation], int, list[str]]:
    """Reads all evaluations of a run folder.

    Returns:
        Those that count, sorted by update and kind; the number of superseded ones; what could not be read.
    """
    found: dict[tuple[str, int, str], Evaluation] = {}
    problems = []
    for path in [*sorted((root / "evaluations").glob("*.json")), *sorted(root.glob("evaluation*.json"))]:
        source = path.relative_to(root).as_posix()
        try:
            value = jsonio.read_json(path)
        except NextTransformerError as error:
            problems.append(str(error).replace(str(path), source))
            continue
        evaluation, failed = parse_evaluation(value, source)
        problems += failed
        if evaluation is not None:
            found[evaluation.kind, evaluation.update, source if evaluation.kind == "standalone" else ""] = evaluation
    for event in events:
        if event.key == EventKey.EVALUATION.value and event.value in KINDS:
            _add_event(found, event)
    counting = [item for item in found.values() if not _is_superseded(item, timeline)]
    counting.sort(key=lambda item: (item.update, KINDS.index(item.kind), item.source))
    return counting, len(found) - len(counting), problems


def _add_event(found: dict[tuple[str, int, str], Evaluation], event: Event) -> None:
    """Adds attempt and duration from an event, and its value where the file is missing."""
    key = (event.value, event.update, "")
    from_file = found.get(key)
    split = FINAL_SPLIT if event.value == "final" else CURVE_SPLIT
    score = dig(event.meta, "bpb", float)
    base = from_file or Evaluation(
        kind=event.value,
        update=event.update,
        source="events.jsonl",
        bpb={} if score is None else {split: score},
        core_v1=dig(event.meta, "core_v1", float),
    )
    found[key] = Evaluation(**{**base.__dict__, "attempt": event.attempt, "seconds": dig(event.meta, "seconds", float)})


def _is_superseded(item: Evaluation, timeline: Timeline) -> bool:
    """An evaluation of an attempt whose update a later attempt repeated, or of an update still to be repeated."""
    if item.attempt is None or item.update == 0:
        return False
    if item.update > timeline.last_update:
        return bool(timeline.attempts)
    effective = timeline.effective_attempt(item.update)
    return effective is not None and item.attempt < effective
