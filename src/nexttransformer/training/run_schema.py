"""Schemas of `run.json` and `run_state.json`, shared by the trainer and the audit."""

from typing import Any, ClassVar, Literal

from nexttransformer.training.strict_record import Count, Digest, Hex16, StrictPart, StrictRecord, Time

Mode = Literal["formal", "open", "smoke"]
Status = Literal["running", "stopped", "finished", "failed"]


class ProtocolRecord(StrictPart):
    """Which protocol, and its constants as they were (compared with the package, never used as truth)."""

    id: str
    digest: Digest
    constants: dict[str, Any]


class DataDigests(StrictPart):
    """Digests of everything the run reads. `core_bundle` is None when the run evaluates no CORE."""

    manifest: Digest
    tokenizer: Digest
    byte_table: Digest
    byte_table_version: str
    data_order: Digest
    val_curve: Digest
    val_final: Digest
    core_bundle: Digest | None


class CodeRecord(StrictPart):
    """Which code ran. `source_digest` is the digest of `source_files` (package file -> SHA-256)."""

    package_version: str
    commit: str | None
    is_clean: bool
    source_digest: Digest
    parts_digest: Digest
    source_files: dict[str, Digest]


class ModelRecord(StrictPart):
    """Sizes of the model as measured at the start; `tensors_digest` covers names, shapes and dtypes."""

    num_parameters: Count
    num_lookup: Count
    num_matmul: Count
    training_flops_per_token: Count
    tensors_digest: Digest
    is_update_dependent: bool


class OptimizerGroupRecord(StrictPart):
    """One optimizer group at learning-rate multiplier 1. `betas` are AdamW's, `momentum` is Muon's peak."""

    name: str
    optimizer: str
    parameters_digest: Digest
    num_parameters: Count
    learning_rate: float
    betas: list[float] | None
    momentum: float | None
    second_beta: float | None
    eps: float
    weight_decay: float


class RunRecord(StrictRecord):
    """`run.json`: written once by attempt 0 before update 1, never changed."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.run/1"

    run_id: Hex16
    created: Time
    mode: Mode
    smoke_updates: Count | None
    num_updates: Count
    method: str
    family: str
    config: dict[str, Any]
    config_digest: Digest
    protocol: ProtocolRecord
    data: DataDigests
    code: CodeRecord
    model: ModelRecord
    optimizer_groups: list[OptimizerGroupRecord]
    precision_policy: str
    loss: str
    seed: int

    @property
    def last_update(self) -> int:
        """The update at which this run ends: `smoke_updates` of a smoke run, else `num_updates`."""
        return self.num_updates if self.smoke_updates is None else self.smoke_updates


class RunState(StrictRecord):
    """`run_state.json`: replaced atomically, read by the batch script; information only."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.run_state/1"

    status: Status
    update: Count
    attempt: Count
    newest_checkpoint: str | None
    reason: str | None
    num_attempts_without_progress: Count
