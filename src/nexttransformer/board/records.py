"""Reading `evidence/`: records and their audits, every problem reported together."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.audit import reader
from nexttransformer.audit.rules import NEVER_WAIVED
from nexttransformer.audit.waivers import Waiver, parse_waivers
from nexttransformer.errors import AuditError, NextTransformerError, join_problems
from nexttransformer.export.record import AttemptOfRecord, CoreTaskOfRecord
from nexttransformer.export.record import Record as RecordFile
from nexttransformer.reporting.tolerant import dig

WALL_CLOCK_SCHEMA = "nexttransformer.wall_clock/1"
FORMAL, DEMO = "formal", "demo"
# Folder of each division inside `evidence/`, and the protocols whose records belong there.
FOLDERS = {FORMAL: "", DEMO: "demo/"}
PROTOCOLS = {FORMAL: ("formal-v1",), DEMO: ("demo-v1", "test-v1")}
MAIN_TRACK = "main"


@dataclass(frozen=True)
class Record:
    """One leaderboard entry. `facts` is the record, `content` and `audit_content` are the files' bytes."""

    facts: RecordFile
    content: bytes = field(repr=False)
    audit_content: bytes = field(repr=False)

    @property
    def division(self) -> str:
        """`formal` or `demo`."""
        return self.facts.division

    @property
    def method(self) -> str:
        """The method's id."""
        return self.facts.method

    @property
    def family(self) -> str:
        """The leaderboard group."""
        return self.facts.family

    @property
    def name(self) -> str:
        """The display name."""
        return self.facts.display_name

    @property
    def bpb(self) -> float:
        """Independent final BPB: what ranks."""
        return self.facts.results.bpb_final.bpb

    @property
    def bpb_curve(self) -> list[tuple[int, float]]:
        """BPB of `val_curve` by update."""
        return list(self.facts.results.bpb_curve)

    @property
    def core_curve(self) -> list[tuple[int, float | None, float | None]]:
        """(update, core_v1, core_v2) as fractions; None where CORE is limited."""
        return list(self.facts.results.core.curve)

    @property
    def core_v1(self) -> float | None:
        """CORE of the last evaluation, a fraction; None if it is limited."""
        return self.core_curve[-1][1] if self.core_curve else None

    @property
    def core_v2(self) -> float | None:
        """The same accuracies with the corrected chance levels."""
        return self.core_curve[-1][2] if self.core_curve else None

    @property
    def core_limited(self) -> float | None:
        """Mean over an excerpt's rows: never comparable with CORE."""
        return self.facts.results.core.core_limited

    @property
    def tasks(self) -> list[CoreTaskOfRecord]:
        """The CORE tasks of the last evaluation."""
        return self.facts.results.core.tasks

    @property
    def is_ranked(self) -> bool:
        """Whether its track is ranked; others are shown beside the ranking."""
        return self.facts.track == MAIN_TRACK

    @property
    def attempts(self) -> list[AttemptOfRecord]:
        """The launches of the run."""
        return self.facts.training.attempts

    @property
    def tokens_per_second(self) -> float:
        """Median over the run, all devices together."""
        return self.facts.training.median_tokens_per_second

    @property
    def tokens_per_second_per_gpu(self) -> tuple[str, float] | None:
        """GPU name and speed of one GPU, if all attempts ran on the same number of one kind; else None."""
        machines = {(tuple(attempt.gpus), attempt.world_size) for attempt in self.attempts}
        if len(machines) != 1:
            return None
        gpus, world_size = machines.pop()
        return (gpus[0], self.tokens_per_second / world_size) if len(gpus) == 1 and world_size else None


@dataclass(frozen=True)
class Evidence:
    """All that the pages are made of. `beta_bpb`: BPB gained per doubling of compute, None until measured."""

    records: dict[str, list[Record]]
    waivers: list[Waiver]
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
    facts, found = RecordFile.problems_of(values[0], str(path))
    problems += found
    if not isinstance(facts, RecordFile):
        return None
    problems += _mismatches(facts, path, division, values[1], audit_path)
    if facts.digests.audit != hashlib.sha256(contents[1]).hexdigest():
        problems.append(f"{audit_path}: is not the file that the record names (digests.audit). Export the run again.")
    return None if len(problems) > before else Record(facts, contents[0], contents[1])


def _mismatches(facts: RecordFile, path: Path, division: str, audit: Any, audit_path: Path) -> list[str]:
    """Returns where record, file name, folder and audit do not fit together."""
    problems = []
    if facts.method != path.stem:
        problems.append(f"{path}: 'method' is '{facts.method}', expected the file's stem '{path.stem}'.")
    if facts.division != division or facts.protocol.id not in PROTOCOLS[division]:
        problems.append(
            f"{path}: division '{facts.division}' under {facts.protocol.id}, expected '{division}' under "
            f"{' or '.join(PROTOCOLS[division])} in this folder."
        )
    if facts.results.bpb_final.bpb <= 0:
        problems.append(f"{path}: results.bpb_final.bpb is {facts.results.bpb_final.bpb}, expected more than 0.")
    for key, expected in (("verdict", "pass"), ("method", facts.method), ("run_id", facts.run_id)):
        got = dig(audit, key, str)
        if got != expected:
            problems.append(f"{audit_path}: '{key}' is {got!r}, expected '{expected}'. Only audited results are shown.")
    return problems


def _read_waivers(path: Path, problems: list[str]) -> list[Waiver]:
    if not path.is_file():
        return []
    try:
        waivers = parse_waivers(reader.read_bytes(path))
    except reader.Malformed as problem:
        problems.append(f"{path}: {problem}")
        return []
    for number, waiver in enumerate(waivers):
        if waiver.check in NEVER_WAIVED:
            problems.append(f"{path}: waivers.{number}.check: {waiver.check} is never waived. Remove the entry.")
    return waivers


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
