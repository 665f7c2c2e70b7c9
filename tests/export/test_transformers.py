"""Every registered method through Transformers: loading by name, logits, generation, padding, beams, dtype."""

import copy
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer import jsonio
from nexttransformer.checking.tiny import build_randomized, random_ids, tiny_copy
from nexttransformer.config import ModelConfig, method_files, resolve_method
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.evaluation.generation import generate_tokens
from nexttransformer.export.hf_files import transformers_files
from nexttransformer.export.reload_check import TRANSFORMERS_TOLERANCE
from nexttransformer.models import Decoder
from nexttransformer.protocol import TEST_V1
from nexttransformer.training.safetensors_file import write_safetensors
from tests.export.exported import ExportedRun

METHODS = sorted(method_files())
# One of each kind of state: keys and values, recurrent, both with streams.
STATES = ["dense_full", "gdn", "mhc_lite_gdn_hybrid_xsa"]
NEW_TOKENS = 6

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@cache
def tiny_model(method: str) -> tuple[ModelConfig, Decoder]:
    config = tiny_copy(resolve_method(method_files()[method], TEST_V1))
    model = build_randomized(config)
    model.set_step(TEST_V1.num_updates)
    return config, model.eval()


@pytest.fixture
def tokenizer(prepared_data: Path) -> Tokenizer:
    return Tokenizer.load(prepared_data / "tokenizer.tiktoken.json")


def write_folder(folder: Path, method: str, tokenizer: Tokenizer) -> None:
    config, model = tiny_model(method)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", dict(model.named_parameters()), {"format": "pt"})
    files = transformers_files(config, tokenizer, update=TEST_V1.num_updates, division="demo")
    for name, content in files.items():
        (folder / name).write_bytes(content)


def load(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), trust_remote_code=True, output_loading_info=True, **options
    )


def greedy(model: Decoder, ids: list[int]) -> list[int]:
    return list(generate_tokens(model, ids, max_tokens=NEW_TOKENS, temperature=0.0, seed=0, stop_id=-1))


def continued(wrapped: Any, ids_BT: Tensor, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids_BT))
    made = wrapped.generate(
        ids_BT, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, **options
    )
    return made[:, ids_BT.shape[1] :]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_loads_and_generates(method: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", method, tokenizer)
    wrapped, info = load(tmp_path / "model")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config, model = tiny_model(method)
    assert wrapped.config.num_hidden_layers == config.num_layers
    ids_BT = random_ids(config, rows=2, num_tokens=9)
    with torch.no_grad():
        expected_BTV, got_BTV = model(ids_BT), wrapped(ids_BT).logits
    assert (got_BTV - expected_BTV).abs().max() <= TRANSFORMERS_TOLERANCE
    assert continued(wrapped, ids_BT[:1])[0].tolist() == greedy(model, ids_BT[0].tolist())


@pytest.mark.parametrize("method", STATES)
def test_generation_in_batches_beams_and_without_a_cache(method: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", method, tokenizer)
    wrapped, _ = load(tmp_path / "model")
    config, model = tiny_model(method)
    rows = [row.tolist() for row in random_ids(config, rows=3, num_tokens=8)]
    rows = [rows[0], rows[1][:5], rows[2][:5]]
    padded = torch.tensor([[tokenizer.bos_id] * (8 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (8 - len(row)) + [1] * len(row) for row in rows])
    made = continued(wrapped, padded, attention_mask=mask)
    assert made.tolist() == [greedy(model, row) for row in rows]
    beams = continued(wrapped, padded, attention_mask=mask, num_beams=3)
    recomputed = continued(wrapped, padded, attention_mask=mask, num_beams=3, use_cache=False)
    assert torch.equal(beams, recomputed)
    assert not torch.equal(beams, made), "beams that change nothing test nothing"


def test_padding_before_and_after_changes_no_logits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "gdn", tokenizer)
    wrapped, _ = load(tmp_path / "model")
    config, model = tiny_model("gdn")
    ids_BT = random_ids(config, rows=1, num_tokens=6)
    with torch.no_grad():
        expected = model(ids_BT)[0]
        for before, after in itertools.product((0, 2), (0, 3)):
            row = functional.pad(ids_BT, (before, after), value=tokenizer.bos_id)
            mask = functional.pad(torch.ones_like(ids_BT), (before, after))
            logits = wrapped(row, attention_mask=mask).logits[0]
            assert torch.equal(logits[before : before + 6], expected)
            assert not logits[:before].any() and not logits[before + 6 :].any()
            # The head's product has another shape then, and its last bits with it.
            for kept in (1, 4):
                last = wrapped(row, attention_mask=mask, logits_to_keep=kept).logits[0]
                assert torch.allclose(last, logits[-kept:], atol=1e-5)
        with pytest.raises(ValueError, match="attention_mask row 0"):
            wrapped(ids_BT, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))


def test_loss_of_labels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "dense_full", tokenizer)
    wrapped, _ = load(tmp_path / "model")
    config, model = tiny_model("dense_full")
    ids_BT = random_ids(config, rows=2, num_tokens=10)
    labels = ids_BT.clone()
    labels[1, 4:] = -100
    with torch.no_grad():
        nats_BT = model(ids_BT[:, :-1], ids_BT[:, 1:])
        loss = wrapped(ids_BT, labels=labels).loss
    kept = torch.cat([nats_BT[0], nats_BT[1, :3]])
    assert loss.item() == pytest.approx(kept.mean().item(), abs=1e-5)


def test_dtype_is_that_of_the_computation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "dense_full", tokenizer)
    wrapped, _ = load(tmp_path / "model", dtype=torch.bfloat16)
    assert wrapped.model.compute_dtype == torch.bfloat16
    assert {parameter.dtype for parameter in wrapped.parameters()} == {torch.float32}
    config, model = tiny_model("dense_full")
    other = copy.deepcopy(model)
    other.compute_dtype = torch.bfloat16
    other._rope = None
    ids_BT = random_ids(config, rows=1, num_tokens=7)
    with torch.no_grad():
        assert torch.equal(wrapped(ids_BT).logits, other(ids_BT))


def test_a_model_can_be_saved_and_loaded_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "gdn_hybrid", tokenizer)
    wrapped, _ = load(tmp_path / "model")
    wrapped.save_pretrained(tmp_path / "again")
    with (tmp_path / "again/config.json").open() as file:
        assert "auto_map" in file.read()
    for name in ("modeling_nexttransformer.py",):
        (tmp_path / "again" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    again, info = load(tmp_path / "again")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids_BT = random_ids(tiny_model("gdn_hybrid")[0], rows=1, num_tokens=7)
    with torch.no_grad():
        assert torch.equal(again(ids_BT).logits, wrapped(ids_BT).logits)


def test_without_the_package_transformers_names_it(exported: ExportedRun) -> None:
    from transformers.dynamic_module_utils import get_imports

    assert get_imports(str(exported.package / "modeling_nexttransformer.py")) == ["nexttransformer"]
    config = jsonio.read_json(exported.package / "config.json")
    assert config["division"] == "demo" and config["trained_updates"] == TEST_V1.num_updates


def test_the_code_of_the_model_card_runs(exported: ExportedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (exported.package / "README.md").read_text().split("```python\n")[1:]
    monkeypatch.chdir(exported.package)
    native, wrapped = ({}, {})
    exec(blocks[0].split("```")[0], native)
    exec(blocks[1].split("```")[0], wrapped)
    assert wrapped["inputs"]["input_ids"][0].tolist() == native["ids"]
    with torch.no_grad():
        assert torch.equal(wrapped["model"](**wrapped["inputs"]).logits, native["logits"])
