"""Declarations of a method's parameters: all declared, in exactly one optimizer group, with a tag that fits."""

from nexttransformer.checking.findings import Finding
from nexttransformer.config import ModelConfig
from nexttransformer.errors import ConfigError
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.layers import Lookup
from nexttransformer.models.parts import ParameterSpec
from nexttransformer.optim.groups import partition_parameters
from nexttransformer.protocol import FORMAL_V1, Protocol

# Above this side a matrix belongs to Muon (R1), up to it to AdamW without decay (R2).
SMALL_SIDE = 64
_SKELETON_TAGS = {
    "lm_head.weight": "head",
    "transformer.wte.weight": "embedding",
    "resid_lambdas": "lambda",
    "x0_lambdas": "x0_lambda",
    "smear_gate.weight": "smear_backout",
    "smear_lambda": "smear_backout",
    "backout_lambda": "smear_backout",
}


def build_declared(config: ModelConfig) -> tuple[Decoder | None, list[Finding]]:
    """Builds the model without storage; a model with undeclared parameters or buffers is not returned."""
    model = build_model(config, "meta")
    findings = []
    try:
        model.parameter_specs()
    except ValueError as error:
        names = str(error).partition(": ")[2]
        findings.append(
            Finding(
                "declaration",
                f"{names}: parameter without tag and initialization. Create it with declare(name, shape, tag=, init=) "
                f"or through Linear, Lookup or CausalConv.",
            )
        )
    findings += [
        Finding(
            "declaration",
            f"{name}: buffer {list(buffer.shape)}, which no checkpoint holds. Compute it from the configuration where "
            f"it is used, or declare a parameter.",
        )
        for name, buffer in model.named_buffers()
    ]
    return (None if findings else model), findings


def declaration_findings(model: Decoder, protocol: Protocol) -> list[Finding]:
    """Checks groups and tags of a model whose parameters are all declared."""
    specs = model.parameter_specs()
    findings = []
    try:
        partition_parameters(specs, protocol)
    except ConfigError as error:
        findings += [Finding("groups", line) for line in str(error).splitlines()]
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Lookup)}
    for name, spec in specs.items():
        problem = _reserved_problem(name, spec, is_table=name in tables)
        # Tags follow the sizes of formal-v1; tiny copies keep them.
        if problem is None and protocol.id == FORMAL_V1.id:
            problem = _size_problem(name, spec)
        if problem is not None:
            findings.append(Finding("tags", f"{name} {list(spec.shape)}: tag '{spec.tag}' {problem}"))
    return findings


def _reserved_problem(name: str, spec: ParameterSpec, *, is_table: bool) -> str | None:
    """Rates of the base's own parameters are not for new ones."""
    wanted = _SKELETON_TAGS.get(name)
    if wanted is not None:
        return None if spec.tag == wanted else f"is not the base's, expected '{wanted}'."
    if is_table:
        return None if spec.tag == "value_embedding" else "on a lookup table, expected 'value_embedding' (R4)."
    if name.startswith("residual."):
        return None if spec.tag == "coefficient" else "in a residual scheme, expected 'coefficient'."
    if spec.tag == "matrix_parity":
        is_gate = name.endswith(".attn.ve_gate.weight") and spec.shape[1] == 12
        return None if is_gate else "is for the value-embedding gates of the base only. Use 'small'."
    if spec.tag in (*_SKELETON_TAGS.values(), "value_embedding"):
        return "is for the base's own parameters. Use 'matrix', 'low_rank', 'small' or 'coefficient'."
    return None


def _size_problem(name: str, spec: ParameterSpec) -> str | None:
    smallest = min(spec.shape[-2:], default=1)
    is_matrix = len(spec.shape) == 2 or spec.units > 1
    if spec.tag == "matrix" and smallest <= SMALL_SIDE:
        return f"with a side of {smallest}, at most {SMALL_SIDE}. Use 'small' (R2)."
    if spec.tag == "low_rank" and smallest < SMALL_SIDE:
        return f"with rank {smallest}, below {SMALL_SIDE}. Use 'small' (R2)."
    if spec.tag == "small" and is_matrix and smallest > SMALL_SIDE:
        return f"with both sides above {SMALL_SIDE} (smallest {smallest}). Use 'matrix' (R1)."
    return None
