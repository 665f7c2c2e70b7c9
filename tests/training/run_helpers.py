"""A small run for the run-file tests: record, state, parameters and an optimizer that needs no training."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nexttransformer.protocol import TEST_V1
from nexttransformer.training.checkpoint import save_checkpoint
from nexttransformer.training.checkpoint_schema import CheckpointDigests, ProtocolFile, TrainerState
from nexttransformer.training.collectives import Collectives, SingleProcess
from nexttransformer.training.run_schema import RunRecord

RUN_ID = "0123456789abcdef"
CONFIG = {"method": "toy", "layers": [{"type": "attention", "window": 64}, {"type": "attention", "window": 0}]}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_record(**changes: Any) -> RunRecord:
    value: dict[str, Any] = {
        "schema": "nexttransformer.run/1",
        "run_id": RUN_ID,
        "created": "2026-01-31T12:00:00.000Z",
        "mode": "open",
        "smoke_updates": None,
        "num_updates": 20,
        "method": "toy",
        "family": "baseline",
        "config": CONFIG,
        "config_digest": sha("config"),
        "protocol": {"id": "test-v1", "digest": TEST_V1.digest, "constants": TEST_V1.constants()},
        "data": {
            "manifest": sha("manifest"),
            "tokenizer": sha("tokenizer"),
            "byte_table": sha("byte_table"),
            "byte_table_version": "byte_table_1",
            "data_order": sha("order"),
            "val_curve": sha("curve"),
            "val_final": sha("final"),
            "core_bundle": sha("bundle"),
        },
        "code": {
            "package_version": "0.1.0",
            "commit": "a" * 40,
            "is_clean": True,
            "source_digest": sha("source"),
            "parts_digest": sha("parts"),
            "source_files": {"models/decoder.py": sha("decoder"), "protocol.py": sha("protocol")},
        },
        "model": {
            "num_parameters": 10,
            "num_lookup": 4,
            "num_matmul": 6,
            "training_flops_per_token": 60,
            "tensors_digest": sha("tensors"),
            "is_update_dependent": False,
        },
        "optimizer_groups": [
            {
                "name": "matrix",
                "optimizer": "muon",
                "parameters_digest": sha("names"),
                "num_parameters": 10,
                "learning_rate": 0.02,
                "betas": None,
                "momentum": 0.97,
                "second_beta": 0.9,
                "eps": 1e-10,
                "weight_decay": 0.1,
            }
        ],
        "precision_policy": "bf16_fp32master_1",
        "loss": "token_cross_entropy_1",
        "seed": 42,
    }
    return RunRecord.from_json({**value, **changes}, "run.json")


def make_state(update: int, record: RunRecord | None = None, **changes: Any) -> TrainerState:
    record = record or make_record()
    value = {
        "run_id": record.run_id,
        "mode": record.mode,
        "method": record.method,
        "update": update,
        "num_updates": record.num_updates,
        "last_update": record.last_update,
        "seed": record.seed,
        "tokens_seen": update * 1024,
        "next_row": update * 8,
        "data_chain": f"{update:016x}",
        "optimizer_updates": update,
        "spike_losses": [6.25, 6.0],
        "num_spikes": 0,
        "attempt": 0,
        "world_size": 1,
        "micro_batch": 8,
        "digests": CheckpointDigests.of_run(record),
    }
    return TrainerState(**{**value, **changes})


def make_parameters(update: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(update)
    shapes = {
        "transformer.wte.weight": (64, 8),
        "transformer.h.0.attn.c_q.weight": (8, 8),
        "lm_head.weight": (64, 8),
        "resid_lambdas": (2,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class FakeOptimizer:
    """Momentum for every parameter, a second state for some; spread over ranks by position."""

    def __init__(self, parameters: dict[str, Tensor], update: int = 0, *, rank: int = 0, world_size: int = 1) -> None:
        self.num_updates_done = update
        generator = torch.Generator().manual_seed(1000 + update)
        self.state: dict[str, Tensor] = {}
        self.writer: dict[str, int] = {}
        for position, (name, tensor) in enumerate(parameters.items()):
            self.state[f"{name}::momentum"] = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 2:
                self.state[f"{name}::second"] = torch.rand(tensor.shape[0], generator=generator)
            self.writer[name] = position % world_size
        self.rank = rank

    def state_tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self.state.items() if self.writer[key.split("::")[0]] == self.rank}

    def expected_state(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in self.state.items()}

    def load_state(self, get: Callable[[str], Tensor]) -> None:
        for key, tensor in self.state.items():
            tensor.copy_(get(key))


PROTOCOL_FILE = ProtocolFile(id="test-v1", digest=TEST_V1.digest, constants=TEST_V1.constants())


def save(root: Path, update: int, *, collectives: Collectives | None = None, **options: Any) -> Any:
    """Saves the state that belongs to `update`: equal bits whenever and by however many ranks it is saved."""
    collectives = collectives or SingleProcess()
    parameters = options.pop("parameters", None) or make_parameters(update)
    optimizer = options.pop("optimizer", None) or FakeOptimizer(
        parameters, update, rank=collectives.rank, world_size=collectives.world_size
    )
    return save_checkpoint(
        root,
        state=options.pop("state", None) or make_state(update),
        model_config=CONFIG,
        protocol=PROTOCOL_FILE,
        parameters=parameters,
        optimizer=optimizer,
        group_of=dict.fromkeys(parameters, "matrix"),
        collectives=collectives,
        **options,
    )
