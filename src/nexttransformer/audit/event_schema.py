"""Schemas of the `meta` of every kind of event, and the values each kind may have."""

from typing import Any, ClassVar, Literal

from nexttransformer.training.events import EventKey
from nexttransformer.training.run_schema import DataDigests, Mode
from nexttransformer.training.strict_record import Count, Digest, Hex16, StrictPart, StrictRecord


class Meta(StrictRecord):
    """Base of all metas. `VALUES` are the event's possible values; None means a text or number of its own."""

    VALUES: ClassVar[frozenset[str] | None] = None

    @classmethod
    def value_problems(cls, value: Any) -> list[str]:
        """Returns what is wrong with the event's value."""
        if cls.VALUES is None:
            return [] if type(value) in (str, int) else ["value: expected a text or a whole number."]
        is_known = isinstance(value, str) and value in cls.VALUES
        return [] if is_known else [f"value: expected one of {', '.join(sorted(cls.VALUES))}."]


class Versions(StrictPart):
    """Versions of an attempt; None where the machine has no such thing."""

    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    triton: str | None
    fla: str | None
    accelerate: str | None
    package: str


class AttemptCode(StrictPart):
    """The code of an attempt."""

    package_version: str
    commit: str | None
    is_clean: bool
    source_digest: Digest
    parts_digest: Digest


class KernelChoice(StrictPart):
    """Which implementation of a fused operation ran, and why."""

    op: str
    path: str
    reason: str
    guard: str
    problem: str | None


class KernelTuning(StrictPart):
    """The tiles of fla-core's kernels: digest of the document, and where it came from."""

    digest: Digest
    source: Literal["run", "site", "package", "measured"]


class KernelVerdict(StrictPart):
    """The kernel self-check of an attempt; the measured ratios are kept as they are."""

    model_config = {**StrictPart.model_config, "extra": "allow"}

    choices: list[KernelChoice]
    passed: bool
    tuning: KernelTuning | None = None


class AttemptStart(Meta):
    """`attempt_start`."""

    mode: Mode
    resumed_from: str | None
    resumed_update: Count
    resumed_complete_digest: Digest | None
    world_size: Count
    num_nodes: Count
    micro_batch: Count
    rank_rows: list[Count]
    hosts: list[Hex16]
    gpus: dict[str, Count]
    versions: Versions
    code: AttemptCode
    config_digest: Digest
    protocol_digest: Digest
    data: DataDigests
    seed: int
    argv: list[str]
    kernels: KernelVerdict


class CheckpointSaved(Meta):
    """`checkpoint_saved`."""

    reason: str
    complete_digest: Digest
    weights_digest: Digest
    tokens_seen: Count
    data_chain: Hex16
    bytes: Count
    seconds: float


class CheckpointNote(Meta):
    """`checkpoint_skipped`, `checkpoint_removed` and `save_failed`."""

    reason: str
    file: str | None


class Evaluation(Meta):
    """`evaluation`; `bpb` or `core_v1` by kind."""

    VALUES: ClassVar[frozenset[str] | None] = frozenset({"val_curve", "core", "final"})

    file: str
    file_digest: Digest
    complete_digest: Digest | None
    seconds: float
    bpb: float | None = None
    core_v1: float | None = None


class StopRequested(Meta):
    """`stop_requested`."""

    VALUES: ClassVar[frozenset[str] | None] = frozenset({"SIGTERM", "SIGINT", "SIGUSR1", "stop_file", "time_limit"})

    rank: Count


class Nonfinite(Meta):
    """`nonfinite`."""

    VALUES: ClassVar[frozenset[str] | None] = frozenset({"loss", "gradient"})

    ranks: list[Count]
    update: Count
    parameters: list[str]


class AnyMeta(Meta):
    """Events that only inform: numbers and ids of their own."""

    model_config = {**Meta.model_config, "extra": "allow"}


class AttemptEnd(Meta):
    """`attempt_end`."""

    VALUES: ClassVar[frozenset[str] | None] = frozenset({"stopped", "finished", "failed"})

    reason: str


class RunEnd(Meta):
    """`run_end`."""

    VALUES: ClassVar[frozenset[str] | None] = frozenset({"finished"})

    checkpoint: str
    complete_digest: Digest


META_SCHEMAS: dict[EventKey, type[Meta]] = {
    EventKey.ATTEMPT_START: AttemptStart,
    EventKey.CHECKPOINT_SAVED: CheckpointSaved,
    EventKey.CHECKPOINT_SKIPPED: CheckpointNote,
    EventKey.CHECKPOINT_REMOVED: CheckpointNote,
    EventKey.SAVE_FAILED: CheckpointNote,
    EventKey.EVALUATION: Evaluation,
    EventKey.STOP_REQUESTED: StopRequested,
    EventKey.NONFINITE: Nonfinite,
    EventKey.SPIKE: AnyMeta,
    EventKey.RECOMPILE: AnyMeta,
    EventKey.FALLBACK: AnyMeta,
    EventKey.SETTING_IGNORED: AnyMeta,
    EventKey.ATTEMPT_END: AttemptEnd,
    EventKey.RUN_END: RunEnd,
}
