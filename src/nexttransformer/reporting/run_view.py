"""Everything a page says about one run, read from its folder; what cannot be read is named, never raised."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, NextTransformerError, ProtocolError
from nexttransformer.protocol import Protocol, get_protocol
from nexttransformer.reporting.audits import AuditView, find_audit
from nexttransformer.reporting.evaluations import CURVE_SPLIT, FINAL_SPLIT, Evaluation, read_evaluations
from nexttransformer.reporting.series import median
from nexttransformer.reporting.timeline import Timeline, build_timeline
from nexttransformer.reporting.tolerant import dig
from nexttransformer.training.events import Event, EventKey, read_events
from nexttransformer.training.lock_file import host_hash, process_start, read_lock
from nexttransformer.training.metrics import read_metrics
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.run_schema import RunRecord

# Updates of an attempt whose speed says little: compilation, first allocations, caches. A run that has no others
# (a smoke run) is judged by all but the first.
_WARM_UPDATES = (10, 1)


@dataclass(frozen=True)
class RunView:
    """One run. `facts` is the content of `run.json` (empty if unreadable): read it with `tolerant.dig`."""

    name: str
    facts: dict[str, Any]
    status: str
    reason: str | None
    events: list[Event]
    timeline: Timeline
    evaluations: list[Evaluation]
    num_superseded_evaluations: int
    audit: AuditView | None
    problems: list[str]

    @property
    def protocol(self) -> Protocol | None:
        """The protocol it ran under, if this version of the package knows it."""
        try:
            return get_protocol(dig(self.facts, "protocol.id", str) or "")
        except ProtocolError:
            return None

    @property
    def tokens_per_update(self) -> int:
        """Tokens of one update, from the log; 0 while there is no line."""
        return self.timeline.effective[0].tokens if self.timeline.effective else 0

    @property
    def last_update(self) -> int | None:
        """Where the run ends, None if unknown."""
        return dig(self.facts, "smoke_updates", int) or dig(self.facts, "num_updates", int)

    @property
    def bpb_curve(self) -> list[tuple[int, float]]:
        """BPB of `val_curve` by update."""
        return [(item.update, item.bpb[CURVE_SPLIT]) for item in self._of("val_curve") if CURVE_SPLIT in item.bpb]

    @property
    def bpb_final(self) -> float | None:
        """BPB of `val_final`, scored at the end by a fresh load."""
        scores = [item.bpb[FINAL_SPLIT] for item in self._of("final") if FINAL_SPLIT in item.bpb]
        return scores[-1] if scores else None

    @property
    def core(self) -> Evaluation | None:
        """The last preset CORE evaluation, else the last of any kind."""
        preset = self._of("core")
        other = [item for item in self.evaluations if item.tasks]
        return preset[-1] if preset else other[-1] if other else None

    @property
    def hours(self) -> list[float]:
        """Training hours up to each effective line (updates only: no evaluations, saves or pauses)."""
        total, result = 0.0, []
        for line in self.timeline.effective:
            total += line.seconds
            result.append(total / 3600)
        return result

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the updates after each attempt's first ones."""
        return median([line.tokens_per_second for line in self._warm_lines()])

    @property
    def mfu_fraction(self) -> float | None:
        """Median model FLOPs utilization, None where the device has no known peak."""
        return median([line.mfu_fraction for line in self._warm_lines() if line.mfu_fraction is not None])

    @property
    def peak_memory_bytes(self) -> int | None:
        """Most memory of a device."""
        values = [line.peak_memory_bytes for line in self.timeline.effective if line.peak_memory_bytes is not None]
        return max(values, default=None)

    @property
    def first_update_seconds(self) -> float | None:
        """Time of the newest attempt's first update, compilation included; None without one."""
        newest = self.timeline.attempts[-1] if self.timeline.attempts else None
        lines = [line for line in self.timeline.effective if newest is not None and line.attempt == newest.number]
        return lines[0].seconds if lines else None

    @property
    def device_hours(self) -> float | None:
        """Training hours times processes over all updates run, superseded ones included; None without log."""
        sizes = {
            item.number: dig(item.start.meta if item.start else None, "world_size", int)
            for item in self.timeline.attempts
        }
        lines = [*self.timeline.effective, *self.timeline.superseded]
        if not lines or any(sizes.get(line.attempt) is None for line in lines):
            return None
        return sum(line.seconds * (sizes[line.attempt] or 0) for line in lines) / 3600

    @property
    def has_gpu(self) -> bool:
        """Whether any attempt ran on a GPU."""
        gpus = [dig(item.start.meta if item.start else None, "gpus", dict) or {} for item in self.timeline.attempts]
        return any(name != "cpu" for each in gpus for name in each)

    def _of(self, kind: str) -> list[Evaluation]:
        return [item for item in self.evaluations if item.kind == kind]

    def _warm_lines(self) -> list[Any]:
        first = {item.number: item.resumed_update for item in self.timeline.attempts}
        for skipped in _WARM_UPDATES:
            warm = [line for line in self.timeline.effective if line.update > first.get(line.attempt, 0) + skipped]
            if warm:
                return warm
        return self.timeline.effective


def read_run(root: Path, name: str) -> RunView:
    """Reads a run folder, finished or running.

    Args:
        root: the folder.
        name: what pages call it.

    Raises:
        CheckpointError: if there is nothing of a run at `root`.
    """
    folder = RunFolder(root)
    if not any(path.is_file() for path in (folder.run_json, folder.events, folder.metrics)):
        kind = "is no folder" if not root.is_dir() else "holds no run.json, events.jsonl or metrics.jsonl"
        raise CheckpointError(f"{root}: {kind}. Expected the folder that 'train --output' wrote.")
    facts, problems = _read_facts(folder)
    events, metrics = read_events(folder.events), read_metrics(folder.metrics)
    for path, log in ((folder.events, events), (folder.metrics, metrics)):
        if not path.is_file():
            problems.append(f"{path.name}: missing.")
        problems += [message for _, message in log.problems]
    problems += [message for _, message in events.chain_problems]
    timeline = build_timeline(events.events, metrics.records)
    evaluations, num_superseded, failed = read_evaluations(root, events.events, timeline)
    last_seq = events.events[-1].seq if events.events else -1
    audit, failed_audits = find_audit(root, dig(facts, "run_id", str), dig(facts, "method", str), last_seq)
    status, reason = _status(folder, events.events)
    return RunView(
        name=name,
        facts=facts,
        status=status,
        reason=reason,
        events=events.events,
        timeline=timeline,
        evaluations=evaluations,
        num_superseded_evaluations=num_superseded,
        audit=audit,
        problems=problems + failed + failed_audits,
    )


def _read_facts(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """Returns `run.json` as far as it is JSON, and every deviation from its schema."""
    path = folder.run_json
    if not path.is_file():
        return {}, ["run.json: missing."]
    try:
        value = jsonio.read_json(path)
    except NextTransformerError as error:
        return {}, [str(error).replace(str(path), path.name)]
    _, problems = RunRecord.problems_of(value, path.name)
    return value if isinstance(value, dict) else {}, problems


def _status(folder: RunFolder, events: list[Event]) -> tuple[str, str | None]:
    """Returns finished, stopped, failed, running, interrupted or unknown, and the recorded reason."""
    if any(event.key == EventKey.RUN_END.value for event in events):
        return "finished", None
    state = folder.read_state()
    if state is None:
        return "unknown", None
    if state.status != "running":
        return state.status, state.reason
    lock = read_lock(folder.lock)
    # On this machine the lock's process can be asked for; elsewhere the lock itself must do.
    is_gone = lock is not None and lock.host == host_hash() and process_start(lock.process_id) is None
    return ("interrupted" if lock is None or is_gone else "running"), state.reason
