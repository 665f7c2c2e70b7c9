"""The JSON of a benchmark: what ran where, and every figure; written again after each part."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nexttransformer import jsonio, provenance
from nexttransformer.benchmark.options import PARTS, BenchOptions
from nexttransformer.errors import ConfigError
from nexttransformer.training.distributed import World
from nexttransformer.training.metrics_math import peak_flops
from nexttransformer.training.strict_record import utc_now
from nexttransformer.training.versions import device_name, kernel_switch, versions

SCHEMA = "nexttransformer.bench/1"


def new_record(options: BenchOptions, world: World) -> dict[str, Any]:
    """Returns the record of a benchmark before anything is measured."""
    name = device_name(world.device)
    return {
        "schema": SCHEMA,
        "created": utc_now(),
        "is_complete": False,
        "versions": {**versions(), "kernel_switch": kernel_switch()},
        "code": _code(),
        "hardware": {
            "device": name,
            "num_devices": world.world_size,
            "num_nodes": world.num_nodes,
            "memory_bytes": (
                torch.cuda.get_device_properties(world.device).total_memory if world.device.type == "cuda" else None
            ),
            "num_cpus": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "peak_flops_per_second": peak_flops(name),
        },
        "settings": {
            "protocol": {"id": options.protocol.id, "digest": options.protocol.digest},
            "micro_batches": list(options.micro_batches),
            "is_sweep": options.is_sweep,
            "num_steps": options.num_steps,
            "num_warmup": options.num_warmup,
            "state": options.state,
            "accumulation": options.accumulation,
            "is_compiled": options.is_compiled and world.device.type == "cuda",
            "parts": [part for part in PARTS if part in options.parts],
            "has_site": options.site is not None,
            "num_gpus": options.num_gpus,
        },
        "machine": {},
        "configurations": [],
        "problems": [],
    }


def _code() -> dict[str, Any]:
    identity = asdict(provenance.code_identity(None))
    return {key: value for key, value in identity.items() if key != "dirty_files"}


def write_record(path: Path | None, record: dict[str, Any], *, is_main: bool) -> None:
    """Writes the record atomically, on rank 0, if a file is wanted.

    Raises:
        ConfigError: if it cannot be written.
    """
    if path is None or not is_main:
        return
    try:
        jsonio.write_json_atomic(path, record)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}. Choose another file.") from None
