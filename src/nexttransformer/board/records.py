"""Reading `evidence/`: records (schema `nexttransformer.record/1`) and their audits, every problem reported together.

What a page cannot do without is required; everything else may be missing and is then shown as a dash.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.errors import AuditError, NextTransformerError, join_problems
from nexttransformer.reporting.tolerant import dig

RECORD_SCHEMA = "nexttransformer.record/1"
WALL_CLOCK_SCHEMA = "nexttransformer.wall_clock/1"
FORMAL, DEMO = "formal", "demo"
# Folder of each division inside `evidence/`, and the protocols whose records belong there.
FOLDERS = {FORMAL: "", DEMO: "demo/"}
PROTOCOLS = {FORMAL: ("formal-v1",), DEMO: ("demo-v1", "test-v1")}
MAIN_TRACK = "main"


@dataclass(frozen=True)
class TaskScore:
    """One CORE task of the last evaluation; `accuracy` and centered values are fractions."""

    label: str
    num_correct: int
    rows: int
    centered_v1: float | None
    centered_v2: float | None

    @property
    def accuracy(self) -> float | None:
        """Share of correct rows."""
        return self.num_correct / self.rows if self.rows else None


@dataclass(frozen=True)
class Record:
    """One leaderboard entry. `value` is the whole record, `content` and `audit_content` the files' bytes."""

    division: str
    method: str
    family: str
    name: str
    track: str
    protocol: str
    bpb: float
    bpb_curve: list[tuple[int, float]]
    core_curve: list[tuple[int, float | None, float | None]]
    tasks: list[TaskScore]
    value: dict[str, Any] = field(repr=False)
    content: bytes = field(repr=False)
    audit_content: bytes = field(repr=False)

    @property
    def core_v1(self) -> float | None:
        """CORE of the last evaluation, a fraction; None if it is limited or missing."""
        return self.core_curve[-1][1] if self.core_curve else None

    @property
    def core_v2(self) -> float | None:
        """The same accuracies with the corrected chance levels."""
        return self.core_curve[-1][2] if self.core_curve else None

    @property
    def core_limited(self) -> float | None:
        """Mean over an excerpt's rows where `core_v1` is None: never comparable with CORE."""
        stated = dig(self.value, "results.core.core_limited", float)
        centered = [task.centered_v1 for task in self.tasks if task.centered_v1 is not None]
        if self.core_v1 is not None:
            return None
        return stated if stated is not None else sum(centered) / len(centered) if centered else None

    @property
    def is_ranked(self) -> bool:
        """Whether its track is ranked; others are shown beside the ranking."""
        return self.track == MAIN_TRACK

    @property
    def num_parameters(self) -> int | None:
        """All parameters."""
        return dig(self.value, "model.num_parameters", int)

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token, causal-exact."""
        return dig(self.value, "model.training_flops_per_token", float)

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the run, all devices together."""
        training = self.value.get("training")
        return next(
            (
                found
                for key in ("tokens_per_second", "median_tokens_per_second", "tokens_per_second_median")
                if (found := dig(training, key, float)) is not None
            ),
            None,
        )

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """World size, micro-batch, GPU and updates of each attempt."""
        return [item for item in dig(self.value, "training.attempts", list) or [] if isinstance(item, dict)]

    @property
    def tokens_per_second_per_gpu(self) -> tuple[str, float] | None:
        """GPU name and speed of one GPU, if all attempts ran on the same number of one kind; else None."""
        machines = {(gpu_of(item), dig(item, "world_size", int)) for item in self.attempts}
        if len(machines) != 1 or self.tokens_per_second is None:
            return None
        gpu, world_size = machines.pop()
        return (gpu, self.tokens_per_second / world_size) if gpu and world_size else None


def gpu_of(attempt: dict[str, Any]) -> str | None:
    """Returns the name of an attempt's GPU; None where it is unknown or mixed."""
    gpus = dig(attempt, "gpus", dict)
    if gpus is not None:
        return next(iter(gpus)) if len(gpus) == 1 else None
    return dig(attempt, "gpu_name", str) or dig(attempt, "gpu", str)


@dataclass(frozen=True)
class Evidence:
    """All that the pages are made of. `beta_bpb`: BPB gained per doubling of compute, None until measured."""

    records: dict[str, list[Record]]
    waivers: list[dict[str, Any]]
    beta_bpb: float | None


def read_evidence(folder: Path) -> Evidence:
    """Reads both divisions; a missing folder is an empty board.

    Raises:
        AuditError: naming every record that cannot be shown, and why.
    """
    problems: list[str] = []
    records: dict[str, list[Record]] = {}
    for division, inside in FOLDERS.items():
        found = []
        for path in sorted((folder / f"{inside}runs").glob("*.json")):
            record = _read_record(path, folder / f"{inside}audits" / path.name, division, problems)
            if record is not None:
                found.append(record)
        records[division] = sorted(found, key=lambda record: (record.bpb, record.method))
    waivers = _read_waivers(folder / "waivers.json", problems)
    beta = _read_beta(folder / "wall_clock.json", problems)
    if problems:
        raise AuditError(join_problems(problems))
    return Evidence(records, waivers, beta)


def _read_record(path: Path, audit_path: Path, division: str, problems: list[str]) -> Record | None:
    before = len(problems)
    contents = []
    values: list[Any] = []
    for each in (path, audit_path):
        try:
            contents.append(each.read_bytes())
            values.append(jsonio.parse_json(contents[-1], str(each), AuditError))
        except OSError as error:
            problems.append(f"{each}: cannot be read: {error.strerror}. A record needs its audit beside it.")
        except NextTransformerError as error:
            problems.append(str(error))
    if len(problems) > before:
        return None
    value, audit = values
    problems += _record_problems(value, path, division)
    verdict = dig(audit, "verdict", str)
    if verdict != "pass":
        problems.append(f"{audit_path}: verdict is {verdict!r}, expected 'pass'. Only audited results are shown.")
    if dig(audit, "method", str) != dig(value, "method", str):
        problems.append(f"{audit_path}: 'method' differs from the record's. Audit and record must be of one run.")
    if len(problems) > before:
        return None
    assert isinstance(value, dict)
    return Record(
        division=division,
        method=value["method"],
        family=value["family"],
        name=value["display_name"],
        track=dig(value, "track", str) or MAIN_TRACK,
        protocol=_protocol_id(value) or "",
        bpb=dig(value, "results.bpb_final.bpb", float) or 0.0,
        bpb_curve=[(update, score) for update, score in _curve(dig(value, "results.bpb_curve", list), ("bpb",))],
        core_curve=_core_curve(value),
        tasks=_tasks(value),
        value=value,
        content=contents[0],
        audit_content=contents[1],
    )


def _record_problems(value: Any, path: Path, division: str) -> list[str]:
    """Returns what is missing or wrong of the fields that a page needs."""
    if dig(value, "schema", str) != RECORD_SCHEMA:
        return [f"{path}: 'schema' is not '{RECORD_SCHEMA}'. Only 'export_run' writes records."]
    problems = [
        f"{path}: '{key}' is missing or no text." for key in ("family", "display_name") if not dig(value, key, str)
    ]
    if dig(value, "method", str) != path.stem:
        problems.append(f"{path}: 'method' is {dig(value, 'method', str)!r}, expected the file's stem '{path.stem}'.")
    if _protocol_id(value) not in PROTOCOLS[division]:
        expected = " or ".join(PROTOCOLS[division])
        problems.append(f"{path}: protocol is {_protocol_id(value)!r}, expected {expected} in the {division} division.")
    bpb = dig(value, "results.bpb_final.bpb", float)
    if bpb is None or bpb <= 0:
        problems.append(f"{path}: 'results.bpb_final.bpb' is missing or no positive number.")
    return problems


def _protocol_id(value: Any) -> str | None:
    return dig(value, "protocol.id", str) or dig(value, "protocol", str)


def _items(entry: Any, keys: tuple[str, ...]) -> list[Any]:
    """Returns an entry written as [update, ...] or as {"update": ..., ...} as a list."""
    if isinstance(entry, dict):
        return [entry.get(key) for key in ("update", *keys)]
    return entry if isinstance(entry, list) else []


def _curve(entries: list[Any] | None, keys: tuple[str, ...]) -> list[tuple[int, float]]:
    points = []
    for entry in entries or []:
        items = _items(entry, keys)
        update, score = dig(items, "0", int), dig(items, "1", float)
        if update is not None and score is not None:
            points.append((update, score))
    return sorted(points)


def _core_curve(value: Any) -> list[tuple[int, float | None, float | None]]:
    keys = ("core_v1", "core_v2")
    entries = dig(value, "results.core.curve", list) or dig(value, "results.core", list) or []
    points = []
    for entry in entries:
        items = _items(entry, keys)
        update = dig(items, "0", int)
        if update is not None:
            points.append((update, dig(items, "1", float), dig(items, "2", float)))
    return sorted(points, key=lambda point: point[0])


def _tasks(value: Any) -> list[TaskScore]:
    tasks = []
    for item in dig(value, "results.core.tasks", list) or dig(value, "results.core_tasks", list) or []:
        label, correct, rows = dig(item, "label", str), dig(item, "num_correct", int), dig(item, "rows", int)
        if label is not None and correct is not None and rows is not None:
            centered = (dig(item, "centered_v1", float), dig(item, "centered_v2", float))
            tasks.append(TaskScore(label, correct, rows, *centered))
    return tasks


def _read_waivers(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        value = jsonio.read_json(path, AuditError)
    except NextTransformerError as error:
        problems.append(str(error))
        return []
    entries = value if isinstance(value, list) else dig(value, "waivers", list)
    if entries is None:
        problems.append(f"{path}: expected a list of waivers.")
    return [item for item in entries or [] if isinstance(item, dict)]


def _read_beta(path: Path, problems: list[str]) -> float | None:
    if not path.is_file():
        return None
    try:
        value = jsonio.read_json(path, AuditError)
    except NextTransformerError as error:
        problems.append(str(error))
        return None
    beta = dig(value, "beta_bpb", float)
    if dig(value, "schema", str) != WALL_CLOCK_SCHEMA or beta is None or beta <= 0:
        problems.append(f"{path}: expected schema '{WALL_CLOCK_SCHEMA}' and a positive number 'beta_bpb'.")
        return None
    return beta
