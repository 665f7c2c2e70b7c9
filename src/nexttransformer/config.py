"""Method configurations: strict JSON, expansion to explicit sizes, canonical digest.

A shipped method file composes parts and states no size that the protocol fixes. `resolve_method`
expands it under a protocol to a `ModelConfig`, which is what runs record and models are built from.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexttransformer import jsonio
from nexttransformer.errors import ConfigError, join_problems, suggest
from nexttransformer.protocol import FORMAL_V1, Protocol, get_protocol
from nexttransformer.registry import load_part, part_names

METHOD_SCHEMA = "nexttransformer.method/1"
MODEL_SCHEMA = "nexttransformer.model_config/1"
_FRACTION_OF_CONTEXT = re.compile(r"T/([1-9][0-9]{0,8})")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScheduleConfig(_Strict):
    """Which mixer each layer uses: `pattern` repeats over the layers, `last` overrides the last one.

    `depth_offset` is added to the protocol's dense depth.
    """

    pattern: str = Field(min_length=1)
    last: str | None = Field(default=None, min_length=1, max_length=1)
    # Far beyond any budget: a mistyped depth is refused before its layers fill the memory.
    depth_offset: int = Field(default=0, le=1000)


class MlpConfig(_Strict):
    """The MLP part and its width under formal-v1; other protocols derive theirs from the budget."""

    type: str
    width: int = Field(gt=0)


class MethodConfig(_Strict):
    """One `configs/<family>/<method>.json`."""

    schema_: str = Field(alias="schema")
    method: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    family: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    name: str = Field(min_length=1)
    schedule: ScheduleConfig
    mixers: dict[str, dict[str, Any]] = Field(min_length=1)
    mlp: MlpConfig
    residual: dict[str, Any]


class ModelConfig(_Strict):
    """Everything a model is built from, sizes explicit: the expanded `model_config.json`.

    `layers` has one {"type": mixer, option: value, ...} per layer with all options spelled out.
    """

    schema_: str = Field(default=MODEL_SCHEMA, alias="schema")
    method: str
    family: str
    protocol: str
    width: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    context_tokens: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    mlp_type: str
    mlp_width: int = Field(gt=0)
    rope_base: float = Field(gt=0)
    qk_gain: float = Field(gt=0)
    logit_soft_cap: float = Field(gt=0)
    layers: list[dict[str, Any]]
    residual: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the expanded configuration as plain JSON data."""
        return self.model_dump(by_alias=True)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes of the expanded configuration."""
        return jsonio.digest(self.to_dict())


def validation_problems(error: ValidationError, where: str, model: type[BaseModel]) -> list[str]:
    """Turns pydantic's findings into our lines, with the nearest known key for an unknown one."""
    lines = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        key = path[-1] if path else ""
        inside = f" in '{'.'.join(path[:-1])}'" if len(path) > 1 else ""
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key '{key}'{inside}.{suggest(key, _known_keys(model, item['loc'][:-1]))}")
        elif item["type"] == "missing":
            lines.append(f"{where}: missing key '{key}'{inside}. Add it.")
        else:
            got = repr(item["input"])
            lines.append(f"{where}: '{'.'.join(path)}': got {got[:80]}; {_lower_first(item['msg'])}.")
    return lines


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def load_method(path: Path) -> MethodConfig:
    """Reads and checks a method file, reporting all of its problems together.

    Raises:
        ConfigError: naming file, key, value, what was expected and the nearest choice.
    """
    if not path.is_file():
        nearest = suggest(str(path), [str(found) for found in method_files().values()])
        raise ConfigError(f"{path}: no such method configuration.{nearest}")
    method = parse_method(jsonio.read_json(path), str(path))
    problems = []
    if path.parent.parent.name == "configs":
        if method.method != path.stem:
            problems.append(f"{path}: 'method' is '{method.method}', expected the file's stem '{path.stem}'.")
        if method.family != path.parent.name:
            problems.append(f"{path}: 'family' is '{method.family}', expected the folder's name '{path.parent.name}'.")
    if problems:
        raise ConfigError(join_problems(problems))
    return method


def parse_method(data: Any, where: str) -> MethodConfig:
    """Checks the content of a method file (see `load_method`); `where` names it in messages."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object.")
    try:
        method = MethodConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(join_problems(validation_problems(error, where, MethodConfig))) from None
    problems = []
    if method.schema_ != METHOD_SCHEMA:
        problems.append(f"{where}: 'schema' is '{method.schema_}', expected '{METHOD_SCHEMA}'.")
    letters = set(method.schedule.pattern) | set(method.schedule.last or "")
    for letter in sorted(letters - set(method.mixers)):
        problems.append(f"{where}: schedule letter '{letter}' names no mixer.{suggest(letter, method.mixers)}")
    for letter in sorted(set(method.mixers) - letters):
        problems.append(f"{where}: mixer '{letter}' is not used by the schedule. Remove it or add the letter.")
    if method.mlp.type not in part_names("mlp"):
        problems.append(f"{where}: unknown mlp '{method.mlp.type}'.{suggest(method.mlp.type, part_names('mlp'))}")
    for letter, options in method.mixers.items():
        problems += _part_problems("mixer", options, f"{where}: mixers.{letter}", FORMAL_V1)
    problems += _part_problems("residual", method.residual, f"{where}: residual", FORMAL_V1)
    if problems:
        raise ConfigError(join_problems(problems))
    return method


def _part_problems(slot: str, options: dict[str, Any], where: str, protocol: Protocol) -> list[str]:
    try:
        _expand_part(slot, options, where, protocol)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _expand_part(slot: str, options: dict[str, Any], where: str, protocol: Protocol) -> dict[str, Any]:
    """Returns {"type", all options} with defaults spelled out and T/n resolved to tokens."""
    if not isinstance(options.get("type"), str):
        raise ConfigError(f"{where}: missing key 'type'.{suggest('', part_names(slot))}")
    kind = options["type"]
    schema = load_part(slot, kind, where).Options
    given = {key: _resolve_length(value, protocol) for key, value in options.items() if key != "type"}
    try:
        resolved = schema.model_validate(given)
    except ValidationError as error:
        raise ConfigError(join_problems(validation_problems(error, where, schema))) from None
    return {"type": kind, **resolved.model_dump()}


def _resolve_length(value: Any, protocol: Protocol) -> Any:
    match = _FRACTION_OF_CONTEXT.fullmatch(value) if isinstance(value, str) else None
    return protocol.context_tokens // int(match.group(1)) if match else value


def expand(method: MethodConfig, protocol: Protocol, *, mlp_width: int | None = None) -> ModelConfig:
    """Expands a method under a protocol.

    Args:
        method: a checked method file.
        protocol: gives every size that a method may not choose.
        mlp_width: the MLP width to use; None takes the stated width under formal-v1 and the width
            that rule B2 derives under any other protocol.
    """
    num_layers = protocol.num_layers + method.schedule.depth_offset
    if num_layers < 1:
        raise ConfigError(f"{method.method}: 'schedule.depth_offset' leaves {num_layers} layers. Expected at least 1.")
    pattern = method.schedule.pattern
    letters = [pattern[layer % len(pattern)] for layer in range(num_layers)]
    if method.schedule.last:
        letters[-1] = method.schedule.last
    where = f"configs/{method.family}/{method.method}.json"
    expanded = {
        letter: _expand_part("mixer", options, f"{where}: mixers.{letter}", protocol)
        for letter, options in method.mixers.items()
    }

    def build(width: int) -> ModelConfig:
        return ModelConfig(
            method=method.method,
            family=method.family,
            protocol=protocol.id,
            width=protocol.width,
            num_heads=protocol.num_heads,
            head_dim=protocol.head_dim,
            context_tokens=protocol.context_tokens,
            vocab_size=protocol.vocab_size,
            num_layers=num_layers,
            mlp_type=method.mlp.type,
            mlp_width=width,
            rope_base=protocol.rope_base,
            qk_gain=protocol.qk_gain,
            logit_soft_cap=protocol.logit_soft_cap,
            layers=[dict(expanded[letter]) for letter in letters],
            residual=_expand_part("residual", method.residual, f"{where}: residual", protocol),
        )

    if mlp_width is not None:
        return build(mlp_width)
    if protocol.id == FORMAL_V1.id:
        return build(method.mlp.width)
    # Imported here: budget builds models, and models are built from this module's types.
    from nexttransformer.models.budget import matched_mlp_width

    return build(matched_mlp_width(build(protocol.mlp_width), protocol))


def parse_model_config(data: Any, where: str) -> ModelConfig:
    """Checks an expanded `model_config.json`."""
    try:
        config = ModelConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(join_problems(validation_problems(error, where, ModelConfig))) from None
    problems = []
    if config.schema_ != MODEL_SCHEMA:
        problems.append(f"{where}: 'schema' is '{config.schema_}', expected '{MODEL_SCHEMA}'.")
    if len(config.layers) != config.num_layers:
        problems.append(
            f"{where}: 'layers' has {len(config.layers)} entries, expected num_layers = {config.num_layers}."
        )
    if config.vocab_size % 64:
        problems.append(f"{where}: 'vocab_size' is {config.vocab_size}, expected a multiple of 64.")
    if config.num_heads * config.head_dim != config.width:
        problems.append(
            f"{where}: num_heads x head_dim is {config.num_heads * config.head_dim}, expected width {config.width}."
        )
    for layer, options in enumerate(config.layers):
        problems += _part_problems("mixer", options, f"{where}: layers.{layer}", FORMAL_V1)
    problems += _part_problems("residual", config.residual, f"{where}: residual", FORMAL_V1)
    if config.mlp_type not in part_names("mlp"):
        problems.append(f"{where}: unknown mlp '{config.mlp_type}'.{suggest(config.mlp_type, part_names('mlp'))}")
    if problems:
        raise ConfigError(join_problems(problems))
    return config


def config_from_dict(data: Any, where: str = "config") -> ModelConfig:
    """Returns the expanded configuration of a shipped method file's content (then in the sizes of
    formal-v1) or of an expanded `model_config.json`.

    Raises:
        ConfigError: naming every problem.
    """
    if isinstance(data, dict) and data.get("schema") == MODEL_SCHEMA:
        return parse_model_config(data, where)
    return expand(parse_method(data, where), FORMAL_V1)


def resolve_method(source: Path | dict[str, Any], protocol: Protocol | str) -> ModelConfig:
    """Returns the configuration of a method file (or its content) under a protocol."""
    protocol = get_protocol(protocol) if isinstance(protocol, str) else protocol
    method = load_method(source) if isinstance(source, Path) else parse_method(source, "config")
    return expand(method, protocol)


def configs_folder() -> Path:
    """Returns the folder of shipped configurations: the repository's, else the installed copy."""
    package = Path(__file__).resolve().parent
    repository = package.parents[1] / "configs"
    return repository if repository.is_dir() else package / "configs"


def method_files() -> dict[str, Path]:
    """Returns method id -> file of every shipped method, sorted by id."""
    files = sorted(configs_folder().glob("*/*.json"), key=lambda path: path.stem)
    return {path.stem: path for path in files}
