"""The fixed protocols: every constant a result depends on, in one place, frozen and hashed.

Nobody re-types a number from here. Changing a value means a new protocol id. Numbers that can only
be known once real data exists (tokenizer, splits, row order) are published separately in
`protocols/<id>/published.json` by `prepare_data --publish`.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nexttransformer import jsonio
from nexttransformer.errors import ProtocolError, suggest

# Reference points of the expressions that resolve learning rates and Muon's decay (nanochat's
# 12-layer model): batch in tokens, width, and 12 tokens per matrix and head parameter.
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_WIDTH = 768
REFERENCE_TRAINING_TOKENS = 12 * 110_100_912

FULL_BUNDLE = "core"
EXCERPT_BUNDLE = "core_excerpt"
# SHA-256 of the `tasks.json` of each CORE bundle; `tasks.json` names the digest of every data file.
BUNDLE_TASKS_DIGESTS = {
    FULL_BUNDLE: "c3d8cdffe20ad41bad240d86b6792e47ff70750c514e80ff5ac0b5fca571d187",
    EXCERPT_BUNDLE: "ca3d24f8cd7035b43bfd8c004ca2b3483a53469a85ed0d4263cf2ac906cd3544",
}


@dataclass(frozen=True)
class GroupSettings:
    """One optimizer group: which tags it takes and its values at learning-rate multiplier 1.

    `betas` are AdamW's; Muon uses its momentum schedule and `second_beta` for the row moments.
    """

    name: str
    optimizer: str
    tags: tuple[str, ...]
    learning_rate: float
    betas: tuple[float, float] | None
    second_beta: float | None
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Protocol:
    """All constants of one protocol. Lengths are in rows, tokens or updates as the names say."""

    id: str
    # Model sizes that no method may change.
    width: int
    num_heads: int
    head_dim: int
    context_tokens: int
    vocab_size: int
    # The dense reference: depth and MLP width, and the step in which a matched width moves.
    num_layers: int
    mlp_width: int
    mlp_width_step: int
    rope_base: float
    qk_gain: float
    logit_soft_cap: float
    # Batch and length.
    global_batch_rows: int
    num_updates: int
    seed: int
    # Optimizer.
    groups: tuple[GroupSettings, ...]
    warmup_updates: int
    warmdown_fraction: float
    final_learning_rate_fraction: float
    momentum_warmup_updates: int
    momentum_start: float
    momentum_peak: float
    momentum_end: float
    # Data.
    tokenizer_training_characters: int
    tokenizer_document_characters: int
    packing_buffer_documents: int
    val_curve_rows: int
    val_final_rows: int
    # Evaluation and saving.
    bpb_every_updates: int
    core_every_updates: int
    core_bundle: str
    core_batch_tokens: int
    core_max_prompt_tokens: int
    bpb_reload_tolerance: float
    bpb_final_tolerance: float
    save_every_updates: int
    # Rules.
    budget_tolerance: float
    lookup_tolerance: float
    matmul_ratio_range: tuple[float, float]
    precision_policy: str = "bf16_fp32master_1"
    loss: str = "token_cross_entropy_1"
    bpb_metric: str = "bpb-1"
    core_metric: str = "core_v1"
    byte_table_version: str = "byte_table_1"

    @property
    def tokens_per_update(self) -> int:
        """Trained tokens of one update: rows x context."""
        return self.global_batch_rows * self.context_tokens

    @property
    def num_tokens(self) -> int:
        """Trained tokens of a whole run."""
        return self.num_updates * self.tokens_per_update

    @property
    def num_rows(self) -> int:
        """Packed rows (context + 1 ids each) that a whole run reads."""
        return self.num_updates * self.global_batch_rows

    def constants(self) -> dict[str, Any]:
        """Returns all constants as plain JSON data."""
        return jsonio.parse_json(jsonio.canonical_bytes(dataclasses.asdict(self)), self.id)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the constants' canonical bytes."""
        return jsonio.digest(self.constants())

    def bpb_updates(self, num_updates: int | None = None) -> list[int]:
        """Updates at which `val_curve` is scored; the last update always counts as preset."""
        last = self.num_updates if num_updates is None else num_updates
        return sorted({*range(0, last + 1, self.bpb_every_updates), last})

    def core_updates(self, num_updates: int | None = None) -> list[int]:
        """Updates at which CORE is scored; never at 0; the last update always counts as preset."""
        last = self.num_updates if num_updates is None else num_updates
        return sorted({*range(self.core_every_updates, last + 1, self.core_every_updates), last})

    def published(self) -> dict[str, Any]:
        """Returns the published data digests, or an empty dict while there are none."""
        path = PUBLISHED_FOLDER / self.id / "published.json"
        return jsonio.read_json(path) if path.exists() else {}


PUBLISHED_FOLDER = Path(__file__).parent / "protocols"


def _groups(*, batch_tokens: int, width: int, training_tokens: int) -> tuple[GroupSettings, ...]:
    """Resolves the optimizer groups from batch (tokens), width and length (tokens) of a protocol."""
    batch = math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS)
    size = (width / REFERENCE_WIDTH) ** -0.5
    muon_decay = 0.28 * batch * REFERENCE_TRAINING_TOKENS / training_tokens

    def adamw(name: str, tags: tuple[str, ...], lr: float, b1: float, b2: float, decay: float) -> GroupSettings:
        return GroupSettings(name, "adamw", tags, lr, (b1, b2), None, 1e-10, decay)

    return (
        GroupSettings(
            "matrix", "muon", ("matrix", "matrix_parity", "low_rank"), 0.02 * batch, None, 0.9, 1e-10, muon_decay
        ),
        adamw("head", ("head",), 0.008 * batch * size, 0.8, 0.96, 0.01),
        adamw("embedding", ("embedding",), 0.3 * batch * size, 0.8, 0.995, 0.001),
        adamw("value_embedding", ("value_embedding",), 0.15 * batch * size, 0.8, 0.995, 0.01),
        adamw("lambda", ("lambda",), 0.005 * batch, 0.8, 0.95, 0.05),
        adamw("x0_lambda", ("x0_lambda",), 0.5 * batch, 0.96, 0.95, 0.0),
        adamw("smear_backout", ("smear_backout",), 0.2, 0.8, 0.95, 0.0),
        adamw("small", ("small",), 0.002, 0.8, 0.95, 0.0),
        adamw("coefficient", ("coefficient",), 0.002, 0.8, 0.95, 0.0),
    )


FORMAL_V1 = Protocol(
    id="formal-v1",
    width=1536,
    num_heads=12,
    head_dim=128,
    context_tokens=2048,
    vocab_size=32_768,
    num_layers=23,
    mlp_width=6144,
    mlp_width_step=64,
    rope_base=100_000.0,
    qk_gain=1.2,
    logit_soft_cap=15.0,
    global_batch_rows=512,
    num_updates=46_875,
    seed=42,
    groups=_groups(batch_tokens=2**20, width=1536, training_tokens=49_152_000_000),
    warmup_updates=40,
    warmdown_fraction=0.65,
    final_learning_rate_fraction=0.05,
    momentum_warmup_updates=400,
    momentum_start=0.85,
    momentum_peak=0.97,
    momentum_end=0.90,
    tokenizer_training_characters=2_000_000_000,
    tokenizer_document_characters=10_000,
    packing_buffer_documents=1000,
    val_curve_rows=5120,
    val_final_rows=20_480,
    bpb_every_updates=625,
    core_every_updates=3125,
    core_bundle=FULL_BUNDLE,
    core_batch_tokens=16_384,
    core_max_prompt_tokens=20_480,
    bpb_reload_tolerance=5e-5,
    bpb_final_tolerance=0.02,
    save_every_updates=625,
    budget_tolerance=0.005,
    lookup_tolerance=0.001,
    matmul_ratio_range=(0.90, 1.10),
)

PROXY_V1 = dataclasses.replace(
    FORMAL_V1,
    id="proxy-v1",
    width=768,
    num_heads=6,
    num_layers=12,
    mlp_width=3072,
    global_batch_rows=256,
    num_updates=2500,
    groups=_groups(batch_tokens=2**19, width=768, training_tokens=1_310_720_000),
    val_curve_rows=1280,
    val_final_rows=5120,
    bpb_every_updates=250,
    core_every_updates=2500,
    save_every_updates=250,
)

# The tiny protocols keep proxy-v1's resolved learning rates: the expressions above extrapolate
# far outside their range at a few thousand tokens per update.
DEMO_V1 = dataclasses.replace(
    PROXY_V1,
    id="demo-v1",
    width=128,
    num_heads=4,
    head_dim=32,
    context_tokens=256,
    vocab_size=4096,
    num_layers=4,
    mlp_width=512,
    mlp_width_step=8,
    global_batch_rows=16,
    num_updates=140,
    warmup_updates=10,
    momentum_warmup_updates=40,
    tokenizer_training_characters=20_000_000,
    val_curve_rows=40,
    val_final_rows=160,
    bpb_every_updates=20,
    core_every_updates=140,
    core_bundle=EXCERPT_BUNDLE,
    core_batch_tokens=16_384,
    core_max_prompt_tokens=20_480,
    bpb_final_tolerance=0.2,
    save_every_updates=20,
)

TEST_V1 = dataclasses.replace(
    DEMO_V1,
    id="test-v1",
    width=64,
    num_heads=2,
    context_tokens=128,
    vocab_size=512,
    mlp_width=256,
    mlp_width_step=2,
    global_batch_rows=8,
    num_updates=20,
    warmup_updates=4,
    momentum_warmup_updates=8,
    tokenizer_training_characters=1_000_000,
    val_curve_rows=16,
    val_final_rows=32,
    bpb_every_updates=5,
    core_every_updates=20,
    bpb_final_tolerance=0.5,
    save_every_updates=5,
)

PROTOCOLS = {protocol.id: protocol for protocol in (FORMAL_V1, PROXY_V1, DEMO_V1, TEST_V1)}


def get_protocol(protocol_id: str) -> Protocol:
    """Returns the protocol of that id.

    Raises:
        ProtocolError: if there is none; the message names the nearest id.
    """
    if protocol_id not in PROTOCOLS:
        raise ProtocolError(f"--protocol {protocol_id}: unknown protocol.{suggest(protocol_id, PROTOCOLS)}")
    return PROTOCOLS[protocol_id]
