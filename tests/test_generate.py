"""Generation: stepping with the state equals recomputing everything, and the command reads checkpoints."""

import json
import shutil

import pytest
import torch

from nexttransformer import generate
from nexttransformer.errors import CheckpointError, ConfigError
from nexttransformer.evaluation import generation
from tests.models.tiny import golden_model, golden_tokens
from tests.training.trainer_runs import arguments, train


def greedy(model, prompt, num_tokens):
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("windows", [[None] * 4, [16, 16, 16, None]])
def test_steps_equal_recomputation(windows):
    model = golden_model(windows)
    prompt = golden_tokens(40)[0][0].tolist()
    made = list(generation.generate_tokens(model, prompt, max_tokens=12, temperature=0, seed=0, stop_id=-1))
    assert made == greedy(model, prompt, 12)
    stopped = generation.generate_tokens(model, prompt, max_tokens=12, temperature=0, seed=0, stop_id=made[5])
    assert list(stopped) == made[: made.index(made[5])]


def test_drawing_is_seeded():
    model = golden_model([None] * 4)

    def draw(seed: int, temperature: float) -> list[int]:
        return list(
            generation.generate_tokens(model, [3, 5], max_tokens=8, temperature=temperature, seed=seed, stop_id=-1)
        )

    assert draw(1, 1.0) == draw(1, 1.0) != draw(2, 1.0)
    assert draw(1, 1e-6) == draw(1, 5e-324) == greedy(model, [3, 5], 8)


def test_command_on_a_checkpoint(prepared_site, tmp_path, capsys):
    assert train(arguments(prepared_site, tmp_path / "run", "--updates", "1")) == [(0, "")]
    capsys.readouterr()
    words = ["--checkpoint", str(tmp_path / "run/checkpoint_00000001"), "--site-config", str(prepared_site)]
    assert generate.main([*words, "--prompt", "naïve ", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("naïve ")
    with pytest.raises(ConfigError, match=r"--max-tokens 0: .*\n--temperature -1.0: "):
        generate.main([*words, "--prompt", "x", "--max-tokens", "0", "--temperature", "-1"])
    for seed in ("-1", "9" * 30):
        with pytest.raises(ConfigError, match=f"--seed {seed}: expected a whole number from 0"):
            generate.main([*words, "--prompt", "x", "--seed", seed])
    with pytest.raises(ConfigError, match="neither a checkpoint nor an export"):
        generate.main(["--checkpoint", str(tmp_path / "run"), "--prompt", "x"])


def test_what_is_said_about_tiles_is_no_part_of_the_text(prepared_site, tmp_path, capsys, monkeypatch):
    def restore(config, checkpoint, *, say, **place):
        say(f"{config.method}: tuned on another GPU ({checkpoint.name})")

    assert train(arguments(prepared_site, tmp_path / "run", "--updates", "1")) == [(0, "")]
    capsys.readouterr()
    monkeypatch.setattr(generation, "restore_tiles", restore)
    words = ["--checkpoint", str(tmp_path / "run/checkpoint_00000001"), "--site-config", str(prepared_site)]
    assert generate.main([*words, "--prompt", "some", "--max-tokens", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("some") and said.err == "dense_full: tuned on another GPU (checkpoint_00000001)\n"


def test_a_damaged_export(prepared_site, tmp_path):
    assert train(arguments(prepared_site, tmp_path / "run", "--updates", "1")) == [(0, "")]
    folder = tmp_path / "run/checkpoint_00000001"
    (folder / "complete.json").unlink()
    shutil.copy(prepared_site.parent / "data/test-v1/tokenizer.tiktoken.json", folder)
    words = ["--checkpoint", str(folder), "--prompt", "x", "--max-tokens", "1"]
    assert generate.main(words) == 0
    # An export needs no site file; one that is named is read all the same.
    assert generate.main([*words, "--site-config", str(prepared_site)]) == 0
    with pytest.raises(ConfigError, match="nowhere.json"):
        generate.main([*words, "--site-config", "nowhere.json"])
    weights, config = folder / "model.safetensors", json.loads((folder / "model_config.json").read_text())
    content = weights.read_bytes()
    weights.write_bytes(b"\xff" * 8 + content[8:])
    with pytest.raises(CheckpointError, match="model.safetensors: damaged: "):
        generate.main(words)
    weights.write_bytes(content)
    (folder / "model_config.json").write_text(json.dumps({**config, "vocab_size": 2**62}))
    with pytest.raises(ConfigError, match="model_config.json: a model of these sizes cannot be built here: "):
        generate.main(words)


def test_a_gpu_that_cannot_be_used_is_one_line(prepared_site, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    assert train(arguments(prepared_site, tmp_path / "run", "--updates", "1")) == [(0, "")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    monkeypatch.setattr(generation, "build_model", fail)
    words = ["--checkpoint", str(tmp_path / "run/checkpoint_00000001"), "--site-config", str(prepared_site)]
    with pytest.raises(ConfigError, match="cannot be built here: CUDA error: all .* unavailable. Use"):
        generate.main([*words, "--prompt", "x"])
