"""The record: the one small file that makes a run a row of the leaderboard. Its schema, its bytes, its digest.

Only `export_run` writes records. A record is a pure function of the run folder, the audit file, the display name
and the submission file: no clock, no machine, no path.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from nexttransformer import jsonio
from nexttransformer.errors import AuditError, NextTransformerError
from nexttransformer.export.submission_file import Link, ShortText, Supersedes, one_line
from nexttransformer.training.strict_record import Count, Digest, Hex16, StrictPart, StrictRecord

Division = Literal["formal", "demo"]
MAX_RECORD_BYTES = 100 * 1000
DEMO_MARK = "DEMO"


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


CurvePoint = Annotated[tuple[Count, float], BeforeValidator(_as_tuple)]
"""(update, BPB)."""
CorePoint = Annotated[tuple[Count, float | None, float | None], BeforeValidator(_as_tuple)]
"""(update, core_v1, core_v2); both None where CORE is limited."""


class ProtocolOfRecord(StrictPart):
    """Which protocol."""

    id: str
    digest: Digest


class ModelOfRecord(StrictPart):
    """Sizes and costs. `flops_ratio` is training FLOPs per token over the reference's, `matmul_ratio` likewise."""

    num_parameters: Count
    num_lookup: Count
    num_matmul: Count
    training_flops_per_token: Count
    flops_ratio: float
    matmul_ratio: float
    decode_state_bytes: Count


class AttemptOfRecord(StrictPart):
    """One launch: it covers the updates after `first_update` up to `last_update`. `gpus`: device name -> count."""

    attempt: Count
    world_size: Count
    num_nodes: Count
    micro_batch: Count
    gpus: dict[str, Count]
    first_update: Count
    last_update: Count


class TrainingOfRecord(StrictPart):
    """What the run took.

    Attributes:
        gpu_hours: seconds of all logged updates, superseded ones too, times processes of their attempt.
        median_tokens_per_second: over the effective updates, of the whole job.
        versions: of the last attempt.
    """

    num_updates: Count
    tokens: Count
    seed: int
    attempts: list[AttemptOfRecord]
    gpu_hours: float
    median_tokens_per_second: float
    versions: dict[str, str | None]


class BpbFinal(StrictPart):
    """Independent final BPB: bpb = nats / (ln 2 x bytes)."""

    nats_hex: str
    nats: float
    bytes: Count
    tokens_counted: Count
    bpb: float


class CoreTaskOfRecord(StrictPart):
    """One CORE task at the last update."""

    label: str
    num_correct: Count
    rows: Count
    centered_v1: float
    centered_v2: float


class CoreOfRecord(StrictPart):
    """CORE. `core_limited` is the v1 mean over an excerpt's rows: no CORE value, and then the curve holds None."""

    curve: list[CorePoint]
    core_limited: float | None
    tasks: list[CoreTaskOfRecord]


class ResultsOfRecord(StrictPart):
    """The published numbers."""

    bpb_final: BpbFinal
    bpb_curve: list[CurvePoint]
    core: CoreOfRecord


class DigestsOfRecord(StrictPart):
    """Ties to everything the result came from. `package`: file name -> SHA-256 of the exported folder."""

    config: Digest
    source: Digest
    parts: Digest
    manifest: Digest
    tokenizer: Digest
    byte_table: Digest
    data_order: Digest
    val_curve: Digest
    val_final: Digest
    core_bundle: Digest
    data_chain: Hex16
    weights: Digest
    complete: Digest
    run: Digest
    audit: Digest
    package: dict[str, Digest]


class AuditOfRecord(StrictPart):
    """Outcome of the audit."""

    verdict: Literal["pass"]
    num_warnings: Count
    num_waivers: Count
    warning_ids: list[str]


class Record(StrictRecord):
    """`evidence/runs/<method>.json`."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.record/1"

    division: Division
    method: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    display_name: ShortText
    track: str
    protocol: ProtocolOfRecord
    package_version: str
    commit: str | None
    run_id: Hex16
    model: ModelOfRecord
    training: TrainingOfRecord
    results: ResultsOfRecord
    digests: DigestsOfRecord
    audit: AuditOfRecord
    supersedes: Supersedes | None
    authors: list[ShortText]
    licence: ShortText | None
    citation: str | None
    links: list[Link]

    _check_name = field_validator("display_name")(one_line)

    @property
    def record_digest(self) -> str:
        """SHA-256 of the record's canonical bytes: what `supersedes` names."""
        return jsonio.digest(self.to_json())

    def file_bytes(self) -> bytes:
        """Returns the one form in which the record is written."""
        return jsonio.pretty_bytes(self.to_json())


# Where web addresses may stand (check P6).
URL_KEYS = frozenset({"links", "citation"})


def load_record(path: Path, error: type[NextTransformerError] = AuditError) -> Record:
    """Reads a record; raises `error` naming every problem of the file."""
    return Record.read(path, error)


def record_path(evidence: Path, division: Division, method: str) -> Path:
    """Returns where the record of a method belongs below an evidence folder."""
    return (evidence if division == "formal" else evidence / "demo") / "runs" / f"{method}.json"
