"""What a configuration's model is, built without storage: sizes, tensors, optimizer groups."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.config import ModelConfig
from nexttransformer.models import build_model
from nexttransformer.models.budget import Budget, measure
from nexttransformer.optim.groups import ParameterGroup, partition_parameters
from nexttransformer.protocol import Protocol
from nexttransformer.provenance import PACKAGE
from nexttransformer.training.run_record import SAFETENSORS_FLOAT32, part_files, tensors_digest


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model on the meta device.

    Attributes:
        budget: parameter counts and costs.
        tensors: parameter name -> (dtype as safetensors writes it, shape).
        tensors_digest: as `run.json` records it.
        groups: optimizer groups in order.
        is_update_dependent: whether any part depends on the update.
        part_files: files of the parts in use, relative to the package.
    """

    budget: Budget
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    tensors_digest: str
    groups: list[ParameterGroup]
    is_update_dependent: bool
    part_files: list[str]


def model_facts(config: ModelConfig, protocol: Protocol) -> ModelFacts:
    """Returns the facts of a registered configuration; remembered per configuration."""
    return _facts(jsonio.canonical_bytes(config.to_dict()), protocol)


@lru_cache(maxsize=64)
def _facts(content: bytes, protocol: Protocol) -> ModelFacts:
    config = ModelConfig.model_validate(jsonio.parse_json(content, "config"))
    model = build_model(config, "meta")
    specs = model.parameter_specs()
    return ModelFacts(
        budget=measure(model),
        tensors={name: (SAFETENSORS_FLOAT32, tuple(spec.shape)) for name, spec in specs.items()},
        tensors_digest=tensors_digest(specs),
        groups=partition_parameters(specs, protocol),
        is_update_dependent=model.is_update_dependent,
        part_files=[Path(path).relative_to(PACKAGE).as_posix() for path in part_files(config)],
    )
