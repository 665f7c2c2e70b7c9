"""Schemas of the JSON files inside a checkpoint folder."""

from typing import Any, ClassVar

from nexttransformer import jsonio
from nexttransformer.training.run_schema import Mode, RunRecord
from nexttransformer.training.strict_record import Count, Digest, Hex16, StrictPart, StrictRecord


class CheckpointDigests(StrictPart):
    """Digests of everything a resumed run or an evaluation must find unchanged."""

    config: Digest
    protocol: Digest
    source: Digest
    manifest: Digest
    tokenizer: Digest
    byte_table: Digest
    data_order: Digest
    val_curve: Digest
    val_final: Digest
    core_bundle: Digest | None

    @classmethod
    def of_run(cls, run: RunRecord) -> "CheckpointDigests":
        """Returns the digests that checkpoints of this run carry."""
        data = run.data
        return cls(
            config=run.config_digest,
            protocol=run.protocol.digest,
            source=run.code.source_digest,
            manifest=data.manifest,
            tokenizer=data.tokenizer,
            byte_table=data.byte_table,
            data_order=data.data_order,
            val_curve=data.val_curve,
            val_final=data.val_final,
            core_bundle=data.core_bundle,
        )


class TrainerState(StrictRecord):
    """`trainer_state.json`: every number besides tensors that changes the future of the run.

    `next_row` = global batch rows x update; `optimizer_updates` is the optimizer's own count;
    `spike_losses` are the guard's last losses (at most 128, oldest first).
    """

    SCHEMA: ClassVar[str | None] = "nexttransformer.trainer_state/1"

    run_id: Hex16
    mode: Mode
    method: str
    update: Count
    num_updates: Count
    last_update: Count
    seed: int
    tokens_seen: Count
    next_row: Count
    data_chain: Hex16
    optimizer_updates: Count
    spike_losses: list[float]
    num_spikes: Count
    attempt: Count
    world_size: Count
    micro_batch: Count
    digests: CheckpointDigests


class StateEntry(StrictPart):
    """One optimizer state tensor; `dtype` as safetensors writes it."""

    dtype: str
    shape: list[Count]


class ParameterEntry(StrictPart):
    """Where one parameter's optimizer state is."""

    file: str
    group: str
    states: dict[str, StateEntry]


class OptimizerIndex(StrictRecord):
    """`optimizer_index.json`: covers every parameter exactly once."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.optimizer_index/1"

    parameters: dict[str, ParameterEntry]


class ProtocolFile(StrictRecord):
    """`protocol.json`: what `evaluate` needs to know of the protocol."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.protocol/1"

    id: str
    digest: Digest
    constants: dict[str, Any]


class FileEntry(StrictPart):
    """A file of the checkpoint, path relative to its folder."""

    path: str
    bytes: Count
    sha256: Digest


class ProtocolReference(StrictPart):
    """Names a protocol."""

    id: str
    digest: Digest


class CompleteMarker(StrictRecord):
    """`complete.json`: written last; the checkpoint exists if and only if it is there and all files match it.

    It is written as canonical bytes, so that `complete_digest` is also the SHA-256 of the file.
    """

    SCHEMA: ClassVar[str | None] = "nexttransformer.complete/1"

    run_id: Hex16
    mode: Mode
    method: str
    protocol: ProtocolReference
    update: Count
    tokens_seen: Count
    data_chain: Hex16
    weights_digest: Digest
    files: list[FileEntry]

    @property
    def complete_digest(self) -> str:
        """The checkpoint's identity: SHA-256 of the marker's canonical bytes."""
        return jsonio.digest(self.to_json())

    @property
    def num_bytes(self) -> int:
        """Bytes of all files besides the marker."""
        return sum(entry.bytes for entry in self.files)
