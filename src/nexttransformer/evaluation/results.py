"""The evaluation file: schema `nexttransformer.evaluation/1`, writing it, and the table people read."""

import platform
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from nexttransformer import __version__, jsonio
from nexttransformer.errors import ConfigError, NextTransformerError
from nexttransformer.evaluation.bpb import IMPLAUSIBLE_BPB, BpbResult
from nexttransformer.provenance import source_digest
from nexttransformer.training.checkpoint_schema import ProtocolReference
from nexttransformer.training.run_schema import Mode
from nexttransformer.training.strict_record import Count, Digest, Hex16, StrictPart, StrictRecord

EvaluationKind = Literal["val_curve", "core", "final", "standalone"]


class EvaluatedCheckpoint(StrictPart):
    """Which weights. `complete_digest` is None for weights that no checkpoint holds (update 0)."""

    complete_digest: Digest | None
    weights_digest: Digest


class Software(StrictPart):
    """Versions; `cuda` is None in a CPU build of torch."""

    nexttransformer: str
    python: str
    torch: str
    cuda: str | None
    source_digest: Digest

    @classmethod
    def current(cls) -> "Software":
        """Returns what runs now."""
        return cls(
            nexttransformer=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            cuda=torch.version.cuda,
            source_digest=source_digest(),
        )


class SplitScore(StrictPart):
    """BPB of one split; `bpb` is recomputable from `nats_hex` and `bytes`."""

    split_digest: Digest
    byte_table_version: str
    byte_table_digest: Digest
    rows: Count
    tokens_counted: Count
    bytes: Count
    nats: float
    nats_hex: str
    bpb: float

    @classmethod
    def of(cls, result: BpbResult, *, split_digest: str, table_version: str, table_digest: str) -> "SplitScore":
        """Returns the stored form of a result."""
        return cls(
            split_digest=split_digest,
            byte_table_version=table_version,
            byte_table_digest=table_digest,
            rows=result.rows,
            tokens_counted=result.tokens_counted,
            bytes=result.bytes,
            nats=result.nats,
            nats_hex=result.nats.hex(),
            bpb=result.bpb,
        )


class CoreTaskScore(StrictPart):
    """One task. What a failed task lacks is None; `correct_bits` is base64, most significant bit first."""

    label: str
    rows: Count
    num_fewshot: Count
    num_correct: Count | None
    accuracy: float | None
    baseline_v1: float
    baseline_v2: float
    centered_v1: float | None
    centered_v2: float | None
    num_prompts: Count
    max_prompt_tokens: Count
    num_beyond_context: Count
    num_cut: Count
    num_prefix_fallbacks: Count
    num_empty_spans: Count
    num_near_ties: Count
    correct_bits: str | None
    error: str | None


class CoreScore(StrictPart):
    """CORE. `core_v1` and `core_v2` are None unless all rows of all 22 tasks were answered."""

    core_v1: float | None
    core_v2: float | None
    core_limited: float | None
    limit: Count | None
    bundle_digest: Digest
    tokenizer_digest: Digest
    path: Literal["shared", "plain"]
    batch_tokens: Count
    num_split_batches: Count
    tasks: list[CoreTaskScore]


class EvaluationRecord(StrictRecord):
    """A whole evaluation file. `bpb` by split name; `core` is None where it was not asked for."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.evaluation/1"

    kind: EvaluationKind
    run_id: Hex16
    mode: Mode
    method: str
    update: Count
    protocol: ProtocolReference
    checkpoint: EvaluatedCheckpoint
    software: Software
    precision: str
    num_processes: Count
    micro_batch: Count
    bpb: dict[str, SplitScore]
    core: CoreScore | None
    errors: list[str]


def check_output(path: Path, complete_digest: str) -> None:
    """Refuses an output path that cannot be written or holds anything but an evaluation of the same checkpoint.

    Raises:
        ConfigError: naming the file and what is there.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: folder {path.parent} does not exist. Create it first.")
    if not path.exists():
        return
    try:
        found = EvaluationRecord.read(path, ConfigError)
    except NextTransformerError:
        raise ConfigError(f"--output {path}: exists and is no evaluation. Not replaced; choose another name.") from None
    if found.checkpoint.complete_digest != complete_digest:
        raise ConfigError(
            f"--output {path}: holds the evaluation of another checkpoint ({found.method}, update {found.update}, "
            f"digest {str(found.checkpoint.complete_digest)[:16]}). Not replaced; choose another name."
        )


def write_record(path: Path, record: EvaluationRecord) -> None:
    """Writes an evaluation file atomically; ConfigError if it cannot be written."""
    try:
        jsonio.write_json_atomic(path, record.to_json())
    except OSError as problem:
        reason = f"cannot be written: {problem.strerror}. Choose another file."
        raise ConfigError(f"{str(path)[:200]}: {reason}") from None


def print_record(record: EvaluationRecord, console: Console) -> None:
    """Prints one table: BPB, CORE, and every task with its counts; 80 columns are enough without cut prompts."""
    tasks = record.core.tasks if record.core is not None else []
    # What is 0 for every task becomes a line below: together with it the table would not fit 80 columns.
    counts = {
        "cut": [task.num_cut for task in tasks],
        "fallback": [task.num_prefix_fallbacks for task in tasks],
        "empty": [task.num_empty_spans for task in tasks],
        "near ties": [task.num_near_ties for task in tasks],
    }
    shown = {name: values for name, values in counts.items() if any(values)}
    table = Table(
        title=f"{record.method}, update {record.update:,} ({record.mode}, {record.protocol.id})",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("measure", no_wrap=True)
    for name in ("value", "centered v1", "centered v2", "rows", *shown):
        table.add_column(name.replace(" ", "\n"), justify="right")
    for split, score in record.bpb.items():
        table.add_row(f"BPB {split}", f"{score.bpb:.6f}", "", "", f"{score.rows:,}")
    if record.core is not None:
        _add_core(table, record.core, shown)
    console.print(table)
    if absent := [name for name in counts if name not in shown and tasks]:
        console.print(f"0 in every task: {', '.join(absent)}.", markup=False, highlight=False)
    for split, score in record.bpb.items():
        if score.bpb < IMPLAUSIBLE_BPB:
            console.print(f"Implausible BPB of {split}: does the model see the future?", markup=False, highlight=False)
    for line in record.errors:
        console.print(f"Missing: {line}", markup=False, highlight=False)


def _add_core(table: Table, core: CoreScore, counts: dict[str, list[int]]) -> None:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    table.add_section()
    for index, task in enumerate(core.tasks):
        values = (percent(task.accuracy), percent(task.centered_v1), percent(task.centered_v2), f"{task.rows:,}")
        table.add_row(task.label, *values, *(f"{of_tasks[index]:,}" for of_tasks in counts.values()))
    table.add_section()
    num_rows = f"{sum(task.rows for task in core.tasks):,}"
    if core.core_limited is not None:
        table.add_row("CORE, limited: not comparable", "", percent(core.core_limited), "", num_rows)
    else:
        table.add_row("CORE", "", percent(core.core_v1), percent(core.core_v2), num_rows)


def as_core_score(value: dict[str, Any]) -> CoreScore:
    """Checks and freezes the `core` part (`CoreResult.to_json`)."""
    return CoreScore.model_validate(value)
