"""What a run writes about itself before update 1: `run.json`, and the facts of each attempt."""

import importlib.util
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexttransformer import jsonio, provenance
from nexttransformer.config import ModelConfig, method_files, resolve_method
from nexttransformer.errors import ProtocolError, join_problems
from nexttransformer.models import build_model
from nexttransformer.models.budget import Budget, measure
from nexttransformer.models.parts import ParameterSpec
from nexttransformer.optim.groups import ParameterGroup, partition_parameters
from nexttransformer.protocol import Protocol
from nexttransformer.registry import part_module
from nexttransformer.training import run_schema
from nexttransformer.training.checkpoint_load import Choice
from nexttransformer.training.distributed import World
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.run_folder import new_run_id
from nexttransformer.training.shares import rank_rows
from nexttransformer.training.strict_record import utc_now
from nexttransformer.training.versions import device_name, host_hash, versions

SAFETENSORS_FLOAT32 = "F32"


def part_files(config: ModelConfig) -> list[Path]:
    """Returns the files that implement the parts a configuration uses."""
    used = {("mixer", layer["type"]) for layer in config.layers}
    used |= {("residual", config.residual["type"]), ("mlp", config.mlp_type)}
    files = set()
    for slot, name in used:
        spec = importlib.util.find_spec(part_module(slot, name))
        assert spec is not None and spec.origin is not None
        files.add(Path(spec.origin))
    return sorted(files)


def tensors_digest(specs: Mapping[str, ParameterSpec]) -> str:
    """Returns the digest over names, dtypes and shapes of all parameters: sorted [name, dtype, shape]."""
    return jsonio.digest(sorted([name, SAFETENSORS_FLOAT32, list(spec.shape)] for name, spec in specs.items()))


def group_records(groups: list[ParameterGroup], protocol: Protocol) -> list[run_schema.OptimizerGroupRecord]:
    """Returns the optimizer groups as `run.json` records them."""
    records = []
    for group in groups:
        settings = group.settings
        records.append(
            run_schema.OptimizerGroupRecord(
                name=settings.name,
                optimizer=settings.optimizer,
                parameters_digest=group.names_digest,
                num_parameters=group.num_parameters,
                learning_rate=settings.learning_rate,
                betas=None if settings.betas is None else list(settings.betas),
                momentum=protocol.momentum_peak if settings.optimizer == "muon" else None,
                second_beta=settings.second_beta,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
        )
    return records


def build_record(options: TrainOptions, data: run_schema.DataDigests) -> tuple[run_schema.RunRecord, Budget]:
    """Returns the record this launch would write as attempt 0, and the measured budget of its model."""
    protocol, config = options.protocol, options.config
    model = build_model(config, "meta")
    specs, budget = model.parameter_specs(), measure(model)
    files = provenance.package_files()
    code = provenance.code_identity(options.config_path)
    record = run_schema.RunRecord(
        run_id=new_run_id(),
        created=utc_now(),
        mode=options.mode,
        smoke_updates=options.smoke_updates,
        num_updates=options.num_updates,
        method=config.method,
        family=config.family,
        config=config.to_dict(),
        config_digest=config.digest,
        protocol=run_schema.ProtocolRecord(id=protocol.id, digest=protocol.digest, constants=protocol.constants()),
        data=data,
        code=run_schema.CodeRecord(
            package_version=code.package_version,
            commit=code.commit,
            is_clean=code.is_clean,
            source_digest=code.source_digest,
            parts_digest=provenance.parts_digest(part_files(config)),
            source_files=files,
        ),
        model=run_schema.ModelRecord(
            num_parameters=budget.num_parameters,
            num_lookup=budget.num_lookup,
            num_matmul=budget.num_matmul,
            training_flops_per_token=round(budget.training_flops_per_token),
            tensors_digest=tensors_digest(specs),
            is_update_dependent=model.is_update_dependent,
        ),
        optimizer_groups=group_records(partition_parameters(specs, protocol), protocol),
        precision_policy=protocol.precision_policy,
        loss=protocol.loss,
        seed=options.seed,
    )
    return record, budget


def check_formal_code(options: TrainOptions) -> None:
    """Refuses a formal run with changed code or an unregistered configuration.

    Raises:
        ProtocolError: naming the changed files or the difference.
    """
    problems = []
    code = provenance.code_identity(options.config_path)
    if not code.is_clean:
        changed = ", ".join(code.dirty_files[:10]) or "no commit and no install stamp is known"
        problems.append(f"--formal: the code is not a clean commit ({changed}). Commit or remove the changes.")
    registered = method_files().get(options.config.method)
    if registered is None or resolve_method(registered, options.protocol).digest != options.config.digest:
        expected = f"{registered}" if registered else "a configuration under configs/"
        problems.append(
            f"--formal: {options.config_path} is not the registered configuration of '{options.config.method}'. "
            f"Expected {expected}."
        )
    if problems:
        raise ProtocolError(join_problems(problems))


def attempt_meta(
    options: TrainOptions,
    world: World,
    record: run_schema.RunRecord,
    code: run_schema.CodeRecord,
    choice: Choice,
    kernels: dict[str, Any],
    *,
    micro_batch: int,
    hosts: list[str],
    devices: list[str],
) -> dict[str, Any]:
    """Returns the `meta` of `attempt_start`.

    Args:
        options, world, choice: the launch.
        record: the run's `run.json`.
        code: what runs now.
        kernels: verdict of the kernel self-check.
        micro_batch: rows per pass as used.
        hosts, devices: host name and device name of every rank.
    """
    return {
        "mode": record.mode,
        "resumed_from": choice.path.name if choice.path else None,
        "resumed_update": choice.update,
        "resumed_complete_digest": choice.marker.complete_digest if choice.marker else None,
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "micro_batch": micro_batch,
        "rank_rows": rank_rows(world.world_size, options.protocol.global_batch_rows),
        "hosts": [host_hash(record.run_id, host) for host in dict.fromkeys(hosts)],
        "gpus": dict(Counter(devices)),
        "versions": versions(),
        "code": code.model_dump(exclude={"source_files"}),
        "config_digest": record.config_digest,
        "protocol_digest": record.protocol.digest,
        "data": record.data.model_dump(),
        "seed": options.seed,
        "argv": list(options.argv),
        "kernels": kernels,
    }


def rank_facts(world: World, options: TrainOptions) -> dict[str, str | None]:
    """Returns what must be equal on all ranks: versions, code, config and protocol."""
    return {
        **versions(),
        "gpu": device_name(world.device),
        "source": provenance.source_digest(),
        "config": options.config.digest,
        "protocol": options.protocol.digest,
        "seed": str(options.seed),
        "micro_batch": str(options.micro_batch),
        "updates": f"{options.num_updates}/{options.last_update}",
        "mode": options.mode,
    }
