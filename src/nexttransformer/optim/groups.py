"""Parameter -> optimizer group: an exact partition, proven from the declared tags.

Every parameter must have exactly one group. All problems of a model are reported together, before
anything is built or trained.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol as Interface

from nexttransformer import jsonio
from nexttransformer.errors import ConfigError, join_problems, suggest
from nexttransformer.protocol import GroupSettings, Protocol


class TaggedShape(Interface):
    """What the partition needs to know of a parameter (`models.parts.ParameterSpec` has it)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored shape; matrices are (out, in)."""
        ...

    @property
    def tag(self) -> str:
        """The one optimizer tag."""
        ...

    @property
    def units(self) -> int:
        """Independent Muon units: E of a stacked [E, out, in] tensor, else 1."""
        ...


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one optimizer group.

    Attributes:
        settings: optimizer and its values at learning-rate multiplier 1.
        names: parameter names, in the order the model declares them.
        num_parameters: elements of all members together.
    """

    settings: GroupSettings
    names: tuple[str, ...]
    num_parameters: int

    @cached_property
    def names_digest(self) -> str:
        """SHA-256 of the canonical JSON of the sorted names: identifies the membership."""
        return jsonio.digest(sorted(self.names))


def partition_parameters(specs: Mapping[str, TaggedShape], protocol: Protocol) -> list[ParameterGroup]:
    """Assigns every parameter to exactly one group.

    Args:
        specs: declarations by parameter name.
        protocol: supplies the groups and the tags each one takes.

    Returns:
        Groups in the protocol's order; groups without members are left out.

    Raises:
        ConfigError: naming every parameter without a tag, with an unknown tag, with a tag that more
            than one group takes, or whose shape Muon cannot update.
    """
    known_tags = [tag for settings in protocol.groups for tag in settings.tags]
    members: dict[str, list[str]] = {settings.name: [] for settings in protocol.groups}
    problems = []
    for name, spec in specs.items():
        takers = [settings for settings in protocol.groups if spec.tag in settings.tags]
        for settings in takers:
            members[settings.name].append(name)
        if not spec.tag:
            problems.append(f"parameter '{name}': no optimizer tag. Choices: {', '.join(sorted(known_tags))}.")
        elif not takers:
            problems.append(f"parameter '{name}': unknown optimizer tag '{spec.tag}'.{suggest(spec.tag, known_tags)}")
        elif len(takers) > 1:
            groups = ", ".join(settings.name for settings in takers)
            problems.append(
                f"parameter '{name}': in more than one group ({groups}), all of which take tag '{spec.tag}'."
            )
        elif takers[0].optimizer == "muon":
            problems.extend(_shape_problems(name, spec))
    if problems:
        raise ConfigError(join_problems(problems))
    return [
        ParameterGroup(settings, tuple(names), sum(prod(specs[name].shape) for name in names))
        for settings in protocol.groups
        if (names := members[settings.name])
    ]


def check_partition(names: Iterable[str], groups: Iterable[ParameterGroup]) -> None:
    """Makes sure that the groups hold exactly these parameters, each once.

    Raises:
        ConfigError: naming every parameter in no group, in more than one, or not in the model.
    """
    known = set(names)
    counts = Counter(name for group in groups for name in group.names)
    problems = [f"parameter '{name}': in no optimizer group." for name in sorted(known - set(counts))]
    problems += [f"parameter '{name}': in a group, but not in the model." for name in sorted(set(counts) - known)]
    problems += [f"parameter '{name}': in {count} groups." for name, count in sorted(counts.items()) if count > 1]
    if problems:
        raise ConfigError(join_problems(problems))


def _shape_problems(name: str, spec: TaggedShape) -> list[str]:
    # Muon's unit is a matrix. A vector or convolution kernel would only crash, or mislead it.
    is_matrix = len(spec.shape) == 2 and spec.units == 1
    is_stack = len(spec.shape) == 3 and spec.units == spec.shape[0]
    if (is_matrix or is_stack) and min(spec.shape) > 0:
        return []
    return [
        f"parameter '{name}': shape {list(spec.shape)} with {spec.units} unit(s) cannot take tag '{spec.tag}': Muon "
        f"updates [out, in] matrices or stacks [units, out, in]. Use 'small' or 'coefficient'."
    ]
