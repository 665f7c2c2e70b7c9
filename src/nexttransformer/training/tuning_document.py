"""The file of kernel tiles, `nexttransformer.kernel_tuning/1`: schema, digest, and what it is called."""

import re
from pathlib import Path
from typing import ClassVar

import pydantic

from nexttransformer import jsonio
from nexttransformer.errors import ConfigError
from nexttransformer.ops.tuning import Choices, Tile
from nexttransformer.training.strict_record import Count, StrictPart, StrictRecord

TUNING_FILE = "kernel_tuning.json"


class TileEntry(StrictPart):
    """One choice: the key (arguments, then tensor types, see `ops.tuning`) and the tile."""

    key: list[bool | int | float | str | None]
    kwargs: dict[str, bool | int | float | str | None]
    num_warps: Count
    num_stages: Count
    num_ctas: Count
    maxnreg: Count | None


class TuningDocument(StrictRecord):
    """Choices measured on one kind of machine; entries of a kernel are in the order of their keys."""

    SCHEMA: ClassVar[str | None] = "nexttransformer.kernel_tuning/1"

    gpu: str
    triton: str
    fla_core: str
    kernels: dict[str, list[TileEntry]]

    @pydantic.field_validator("kernels")
    @classmethod
    def _check_order(cls, kernels: dict[str, list[TileEntry]]) -> dict[str, list[TileEntry]]:
        for kernel, entries in kernels.items():
            keys = [jsonio.canonical_bytes(entry.key) for entry in entries]
            if keys != sorted(set(keys)):
                raise ValueError(f"{kernel}: entries are not in the order of their keys, each once")
        return kernels

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes."""
        return jsonio.digest(self.to_json())

    @property
    def machine(self) -> tuple[str, str, str]:
        """GPU, Triton and fla-core."""
        return self.gpu, self.triton, self.fla_core

    def choices(self) -> Choices:
        """Returns the choices in the form that `ops.tuning` installs."""
        return {
            (kernel, tuple(entry.key)): Tile(
                tuple(sorted(entry.kwargs.items())), entry.num_warps, entry.num_stages, entry.num_ctas, entry.maxnreg
            )
            for kernel, entries in self.kernels.items()
            for entry in entries
        }

    @classmethod
    def read_choices(cls, path: Path) -> "TuningDocument":
        """Reads a file; raises ConfigError with what is wrong and what to do, in one line."""
        try:
            return cls.read(path, ConfigError)
        except ConfigError as error:
            raise ConfigError(refusal(path, str(error).splitlines()[0])) from None


def refusal(path: Path, problem: str) -> str:
    """Returns a problem of a file, which may quote anything out of it, as one line of readable length."""
    line = " ".join(problem.split())
    # The tiles of a run are part of its evidence.
    advice = "Restore the file, or start a new run." if path.name == TUNING_FILE else "Delete the file to tune again."
    return f"{line if len(line) <= 600 else line[:600] + '...'} {advice}"


def make_document(machine: tuple[str, str, str], choices: Choices) -> TuningDocument:
    """Returns the document of some choices measured on a machine (GPU, Triton, fla-core)."""
    kernels: dict[str, list[TileEntry]] = {}
    for (kernel, key), tile in choices.items():
        kernels.setdefault(kernel, []).append(
            TileEntry(key=list(key), **{**tile._asdict(), "kwargs": dict(tile.kwargs)})
        )
    for entries in kernels.values():
        entries.sort(key=lambda entry: jsonio.canonical_bytes(entry.key))
    gpu, triton, fla_core = machine
    return TuningDocument(gpu=gpu, triton=triton, fla_core=fla_core, kernels=dict(sorted(kernels.items())))


def file_name(machine: tuple[str, str, str]) -> str:
    """Returns `<gpu>-triton-<version>-fla-<version>.json` in letters, digits, dots and underscores."""
    gpu, triton, fla_core = (re.sub(r"[^0-9A-Za-z.]+", "_", part).strip("_.") for part in machine)
    return f"{gpu}-triton-{triton}-fla-{fla_core}.json"
