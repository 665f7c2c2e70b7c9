"""What a method's page says about it besides results: its configuration and the mathematics of its parts.

The texts are the docstrings of the part files, read without importing them.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from nexttransformer import jsonio
from nexttransformer.config import method_files
from nexttransformer.registry import MIXERS, MLPS, RESIDUALS, part_module
from nexttransformer.reporting.tolerant import dig

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PartText:
    """One part: slot ("mixer", "residual", "mlp"), name, file inside the package, docstring."""

    slot: str
    name: str
    file_name: str
    text: str


@dataclass(frozen=True)
class MethodText:
    """One registered method. `config` is the file's text, `parts` what it is made of."""

    method: str
    family: str
    name: str
    config: str
    parts: list[PartText]


def part_text(slot: str, name: str) -> PartText:
    """Returns the text of a registered part: its file's docstring and those of sibling files it refers to.

    Of a file with several small parts (the MLPs) it is the class's docstring.
    """
    target = {"mixer": MIXERS, "residual": RESIDUALS, "mlp": MLPS}[slot][name]
    path = _PACKAGE.joinpath(*part_module(slot, name).split(".")[1:]).with_suffix(".py")
    file_name = path.relative_to(_PACKAGE).as_posix()
    module = _parse(path)
    if slot == "mlp":
        class_name = target.partition(":")[2]
        texts = [ast.get_docstring(n) for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name]
        return PartText(slot, name, file_name, texts[0] or "")
    text = ast.get_docstring(module) or ""
    siblings = [path.with_name(f"{word}.py") for word in dict.fromkeys(re.findall(r"`(\w+)`", text))]
    more = [ast.get_docstring(_parse(sibling)) or "" for sibling in siblings if sibling.is_file() and sibling != path]
    return PartText(slot, name, file_name, "\n\n".join([text, *more]))


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_method_texts() -> list[MethodText]:
    """Returns every registered method, sorted by family and id."""
    methods = []
    for method, path in method_files().items():
        value = jsonio.read_json(path)
        mixers = dig(value, "mixers", dict) or {}
        names = {dig(mixer, "type", str) for mixer in mixers.values()}
        parts = [part_text("mixer", name) for name in [name for name in MIXERS if name in names]]
        residual, mlp = dig(value, "residual.type", str), dig(value, "mlp.type", str)
        parts += [part_text("residual", residual)] if residual in RESIDUALS else []
        parts += [part_text("mlp", mlp)] if mlp in MLPS else []
        methods.append(
            MethodText(
                method=method,
                family=path.parent.name,
                name=dig(value, "name", str) or method,
                config=path.read_text(encoding="utf-8"),
                parts=parts,
            )
        )
    return sorted(methods, key=lambda item: (item.family, item.method))
