"""Rule R2: a published number changes or disappears only where the new record names the one it supersedes."""

from dataclasses import dataclass
from pathlib import Path

from nexttransformer.errors import AuditError
from nexttransformer.export.record import Record, load_record


@dataclass(frozen=True)
class Change:
    """A published value that differs; None where a side has none."""

    name: str
    old: float | None
    new: float | None

    def line(self) -> str:
        """Returns old, new and difference."""
        if self.old is None or self.new is None:
            return f"{self.name}: {_text(self.old)} -> {_text(self.new)}"
        return f"{self.name}: {_text(self.old)} -> {_text(self.new)} ({self.new - self.old:+.6g})"


def _text(value: float | None) -> str:
    return "none" if value is None else repr(value)


def published_numbers(record: Record) -> dict[str, float | None]:
    """Returns name -> value of everything that pages show as a number of this result."""
    results, model, training = record.results, record.model, record.training
    numbers: dict[str, float | None] = {f"bpb_final.{key}": getattr(results.bpb_final, key) for key in ("bpb", "nats")}
    numbers |= {f"bpb_final.{key}": getattr(results.bpb_final, key) for key in ("bytes", "tokens_counted")}
    numbers |= {f"bpb_curve[{update}]": bpb for update, bpb in results.bpb_curve}
    for update, core_v1, core_v2 in results.core.curve:
        numbers |= {f"core_v1[{update}]": core_v1, f"core_v2[{update}]": core_v2}
    numbers["core_limited"] = results.core.core_limited
    for task in results.core.tasks:
        for key in ("num_correct", "rows", "centered_v1", "centered_v2"):
            numbers[f"{task.label}.{key}"] = getattr(task, key)
    for key in ("num_parameters", "num_lookup", "num_matmul", "training_flops_per_token", "flops_ratio"):
        numbers[f"model.{key}"] = getattr(model, key)
    numbers |= {f"model.{key}": getattr(model, key) for key in ("matmul_ratio", "decode_state_bytes")}
    for key in ("num_updates", "tokens", "seed", "gpu_hours", "median_tokens_per_second"):
        numbers[f"training.{key}"] = getattr(training, key)
    return numbers


def changes(old: Record, new: Record) -> list[Change]:
    """Returns every published number that differs or is missing on one side."""
    before, after = published_numbers(old), published_numbers(new)
    names = [*before, *(name for name in after if name not in before)]
    return [Change(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]


def replacement_problem(path: Path, new: Record) -> str | None:
    """Returns why a record may not be written over the file that is at `path`; None if it may.

    Demo records are nobody's result: a new one replaces an old one freely.
    """
    if not path.exists():
        return None
    try:
        old = load_record(path)
    except AuditError:
        return f"--output {path}: exists and is no record. Move it away or name another file."
    if new.division == "demo" and old.division == "demo":
        return None
    is_named = new.supersedes is not None and new.supersedes.record_digest == old.record_digest
    if is_named or (not changes(old, new) and old.run_id == new.run_id):
        return None
    return (
        f"--output {path}: holds the record of run {old.run_id} with other numbers. To replace it, put "
        f'"supersedes": {{"record_digest": "{old.record_digest}", "reason": "..."}} into the --submission file.'
    )
