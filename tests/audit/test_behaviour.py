"""M4 and M5: parts that cheat are found, honest ones of every kind pass."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nexttransformer import jsonio, registry
from nexttransformer.audit.code_reference import InstalledCode
from nexttransformer.audit.model_behaviour import (
    Behaviour,
    behaviour,
    causality_problems,
    distribution_problems,
)
from nexttransformer.audit.reference import Reference
from nexttransformer.audit.report import AuditRecord
from nexttransformer.checking.tiny import build_randomized, tiny_copy
from nexttransformer.config import ModelConfig, method_files, resolve_method
from nexttransformer.models import Decoder
from nexttransformer.models.mixers.attention import Attention
from nexttransformer.models.parts import MixerInput
from tests.audit.conftest import found
from tests.audit.edit import RunCopy


class BlockMean(Attention):
    """A part for these tests that looks ahead: every token sees the mean over its block of 64."""

    def forward(self, x: MixerInput, *arguments, **options):  # type: ignore[override]
        y_BTD, state = super().forward(x, *arguments, **options)
        blocks = [block.mean(1, keepdim=True).expand_as(block) for block in y_BTD.split(64, dim=1)]
        return y_BTD + 0.01 * torch.cat(blocks, dim=1), state


class LateLeak(Attention):
    """Looks ahead only through the last token of long rows."""

    def forward(self, x: MixerInput, *arguments, **options):  # type: ignore[override]
        y_BTD, state = super().forward(x, *arguments, **options)
        return (y_BTD + 1e-3 * y_BTD[:, -1:] if y_BTD.shape[1] > 100 else y_BTD), state


class BatchMean(Attention):
    """Mixes the rows of a batch."""

    def forward(self, x: MixerInput, *arguments, **options):  # type: ignore[override]
        y_BTD, state = super().forward(x, *arguments, **options)
        return y_BTD + 0.01 * y_BTD.mean(0, keepdim=True), state


@pytest.fixture
def config() -> ModelConfig:
    return resolve_method(method_files()["dense_full"], "test-v1")


def with_part(config: ModelConfig, part: type[Attention], monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """Registers a part and returns the configuration with it in the second layer."""
    # Results are remembered by configuration, so every part has a name of its own.
    name = part.__name__.lower()
    monkeypatch.setitem(registry.MIXERS, name, f"{__name__}:{part.__name__}")
    monkeypatch.setattr(registry.importlib, "import_module", _import(part))
    layers = [dict(layer) for layer in config.layers]
    layers[1]["type"] = name
    return config.model_copy(update={"layers": layers})


def _import(part: type[Attention]) -> Callable[[str], object]:
    import importlib

    real = importlib.import_module

    def load(name: str, *arguments: str) -> object:
        return type("Module", (), {part.__name__: part}) if name == __name__ else real(name, *arguments)

    return load


@pytest.mark.parametrize(
    ("part", "part_of_problem"), [(BlockMean, "from 1 on"), (LateLeak, "from 1 on"), (BatchMean, None)]
)
def test_cheating_parts(
    part: type[Attention], part_of_problem: str | None, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = behaviour(with_part(config, part, monkeypatch))
    assert result.crash is None
    if part_of_problem is None:
        assert result.causality == () and "other row" in result.distribution[0]
    else:
        assert part_of_problem in result.causality[0] and "gradient" in result.causality[1]
        assert result.distribution == ()


class ExtraId(nn.Module):
    """A head that scores one id more than the vocabulary has."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: Tensor) -> Tensor:
        logits = self.head(h)
        return torch.cat([logits, logits[..., :1]], dim=-1)


def tiny(config: ModelConfig) -> Decoder:
    return build_randomized(tiny_copy(config).model_copy(update={"context_tokens": 160}))


def test_a_head_with_one_extra_id(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(config)
    assert distribution_problems(model) == causality_problems(model) == []

    def head_logits(self: Decoder, h: Tensor) -> Tensor:
        cap = self.config.logit_soft_cap
        return cap * torch.tanh(ExtraId(self.lm_head)(h).float() / cap)

    def forward(self: Decoder, ids_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        logits = self.head_logits(self.hidden(ids_BT)[0])
        if targets_BT is None:
            return logits
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets_BT, reduction="none")

    monkeypatch.setattr(Decoder, "head_logits", head_logits)
    monkeypatch.setattr(Decoder, "forward", forward)
    problems = distribution_problems(model)
    assert "log-probability" in problems[0] and "513 ids" in problems[1]


@pytest.mark.parametrize("method", ["gdn_hybrid", "mudd"])
def test_honest_methods(method: str) -> None:
    assert behaviour(resolve_method(method_files()[method], "formal-v1")) == Behaviour()


def test_the_checks_report_what_a_part_does(
    run: RunCopy,
    audit: Callable[..., AuditRecord],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(registry.MIXERS, "cheat", f"{__name__}:BlockMean")
    monkeypatch.setattr(registry.importlib, "import_module", _import(BlockMean))
    value = jsonio.read_json(method_files()["dense_full"])
    for mixer in value["mixers"].values():
        mixer["type"] = "cheat"
    folder = tmp_path / "configs/baseline"
    folder.mkdir(parents=True)
    (folder / "dense_full.json").write_bytes(jsonio.canonical_bytes(value))
    record = audit(run, reference=dataclasses.replace(reference, code=InstalledCode(configs=folder.parent)))
    assert ("M4", "error") in found(record) and ("M5", "error") not in found(record)
    assert ("P2", "error") in found(record)
