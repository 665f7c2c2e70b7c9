"""The evaluate command on a checkpoint of a tiny run: values, refusals, processes, moved folders."""

import dataclasses
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from nexttransformer import evaluate
from nexttransformer.config import ModelConfig
from nexttransformer.errors import CheckpointError, ConfigError, DataError, NextTransformerError, ProtocolError
from nexttransformer.evaluation import inputs
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, load_bundle
from nexttransformer.evaluation.inputs import open_bundle, open_inputs
from nexttransformer.evaluation.results import EvaluationRecord, print_record
from nexttransformer.evaluation.scoring import Subject, evaluate_checkpoint, evaluate_model, open_checkpoint
from nexttransformer.models import build_model, config_from_dict
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE, FORMAL_V1, TEST_V1
from nexttransformer.site_config import load_site_config
from nexttransformer.training import kernel_tuning
from nexttransformer.training.collectives import SingleProcess
from tests.distributed import run_ranks
from tests.training.trainer_runs import arguments, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(prepared_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run of two updates."""
    output = tmp_path_factory.mktemp("run") / "run"
    assert train(arguments(prepared_site, output, "--updates", "2")) == [(0, "")]
    return output / "checkpoint_00000002"


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The excerpt without shots: all tasks, a tenth of the time."""
    bundle = load_bundle(EXCERPT_FOLDER, BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE])
    tasks = tuple(dataclasses.replace(task, num_fewshot=0) for task in bundle.tasks)
    monkeypatch.setattr(inputs, "load_bundle", lambda path, digest: dataclasses.replace(bundle, tasks=tasks))


def words(checkpoint: Path, output: Path, site: Path, *more: str) -> list[str]:
    common = ["--checkpoint", checkpoint, "--output", output, "--micro-batch", 4, "--site-config", site, *more]
    return [str(word) for word in common]


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, prepared_site: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationRecord:
    output = tmp_path_factory.mktemp("evaluated") / "evaluation.json"
    assert evaluate.main(words(checkpoint, output, prepared_site)) == 0
    return EvaluationRecord.read(output)


def values(record: EvaluationRecord) -> dict[str, Any]:
    """What must not depend on where and on how many processes it was computed."""
    return {key: value for key, value in record.to_json().items() if key not in ("num_processes", "software")}


def test_all_requested_values_are_there(evaluated: EvaluationRecord, checkpoint: Path) -> None:
    marker = json.loads((checkpoint / "complete.json").read_text())
    assert (evaluated.kind, evaluated.mode, evaluated.method, evaluated.update) == (
        "standalone",
        "open",
        "dense_full",
        2,
    )
    assert evaluated.checkpoint.weights_digest == marker["weights_digest"]
    assert (
        evaluated.checkpoint.complete_digest == hashlib.sha256((checkpoint / "complete.json").read_bytes()).hexdigest()
    )
    assert (evaluated.precision, evaluated.num_processes, evaluated.micro_batch, evaluated.errors) == (
        "float32",
        1,
        4,
        [],
    )
    # Update 2 is the run's last, so the independent split is scored too.
    assert list(evaluated.bpb) == ["val_curve", "val_final"]
    for split, score in evaluated.bpb.items():
        assert score.rows == getattr(TEST_V1, f"{split}_rows")
        assert score.nats == float.fromhex(score.nats_hex)
        assert 2.0 < score.bpb < 8.0
    core = evaluated.core
    assert core is not None and len(core.tasks) == 22
    assert (core.core_v1, core.core_v2, core.limit, core.path) == (None, None, None, "shared")
    assert core.core_limited is not None
    assert core.bundle_digest == BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE]


def test_a_moved_checkpoint_evaluates_the_same(
    checkpoint: Path, evaluated: EvaluationRecord, prepared_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))
    monkeypatch.setenv("NEXTTRANSFORMER_SITE_CONFIG", str(prepared_site))
    output = tmp_path / "out.json"
    command = ["--checkpoint", str(moved), "--output", str(output), "--micro-batch", "4", "--eval", "bpb"]
    assert evaluate.main(command) == 0
    assert values(EvaluationRecord.read(output)) == {**values(evaluated), "core": None}


def run_command_rank(rank: int, world_size: int, command: list[str]) -> int:
    return evaluate.main(command)


@pytest.mark.dist
def test_two_processes_give_the_same_bits(
    checkpoint: Path, evaluated: EvaluationRecord, prepared_site: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    assert run_ranks(run_command_rank, 2, words(checkpoint, output, prepared_site), with_group=False) == [0, 0]
    record = EvaluationRecord.read(output)
    assert record.num_processes == 2
    assert values(record) == values(evaluated)


@pytest.mark.usefixtures("short_prompts")
def test_limited_rows_are_labelled(checkpoint: Path, prepared_site: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert evaluate.main(words(checkpoint, output, prepared_site, "--eval", "core", "--limit", "11")) == 0
    record = EvaluationRecord.read(output)
    assert record.bpb == {} and record.core is not None
    assert (record.core.limit, record.core.core_v1) == (11, None)
    assert {task.rows for task in record.core.tasks} == {11}


def test_a_limit_below_the_shots_is_refused(checkpoint: Path, prepared_site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--limit 3: .*Expected at least 11"):
        evaluate.main(words(checkpoint, tmp_path / "out.json", prepared_site, "--eval", "core", "--limit", "3"))
    assert not (tmp_path / "out.json").exists()


def test_the_runs_tiles_come_first(
    checkpoint: Path, prepared_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(config: ModelConfig, folder: Path, *, cache_root: Path, **place: Any) -> None:
        assert (config.method, folder) == ("dense_full", checkpoint)
        raise ConfigError(f"tiles of {cache_root} are damaged")

    monkeypatch.setattr(kernel_tuning, "restore_tiles", restore)
    with pytest.raises(ConfigError, match=f"tiles of {load_site_config(prepared_site).cache_root} are damaged"):
        evaluate.main(words(checkpoint, tmp_path / "out.json", prepared_site))


def test_bad_flags_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate.main(["--checkpoint", "a", "--output", "b", "--micro-batch", "0", "--eval", "bbp", "--limit", "0"])
    lines = str(caught.value).split("\n")
    assert [line.split(":")[0] for line in lines] == ["--micro-batch 0", "--eval bbp", "--limit 0", "--limit 0"]
    with pytest.raises(ConfigError, match="--limit 9{25}: expected a whole number of rows from 1 to 1000000"):
        evaluate.main(["--checkpoint", "a", "--output", "b", "--micro-batch", "1", "--limit", "9" * 25])
    assert "Did you mean 'bpb'?" in lines[1]


def test_only_an_evaluation_of_the_same_checkpoint_is_replaced(
    checkpoint: Path, prepared_site: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.json"
    command = words(checkpoint, output, prepared_site, "--eval", "bpb")
    output.write_text('{"mine": true}')
    with pytest.raises(ConfigError, match="is no evaluation. Not replaced"):
        evaluate.main(command)
    output.unlink()
    assert evaluate.main(command) == 0
    first = output.read_bytes()
    assert evaluate.main(command) == 0
    assert output.read_bytes() == first
    other = json.loads(first)
    other["checkpoint"]["complete_digest"] = "0" * 64
    output.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="evaluation of another checkpoint"):
        evaluate.main(command)
    with pytest.raises(ConfigError, match="folder .* does not exist"):
        evaluate.main(words(checkpoint, tmp_path / "no/out.json", prepared_site))


def test_an_incomplete_checkpoint_is_refused_by_name(checkpoint: Path, prepared_site: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CheckpointError, match="model.safetensors"):
        evaluate.main(words(damaged, tmp_path / "out.json", prepared_site))
    (damaged / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        evaluate.main(words(damaged, tmp_path / "out.json", prepared_site))


@pytest.mark.parametrize("name", ["tokenizer", "byte_table", "val_curve", "val_final", "core_bundle"])
def test_other_inputs_than_the_checkpoints_are_refused(checkpoint: Path, prepared_site: Path, name: str) -> None:
    opened = open_checkpoint(checkpoint, SingleProcess())
    digests = {"core_bundle": BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE], name: "0" * 64}
    state = opened.state.model_copy(update={"digests": opened.state.digests.model_copy(update=digests)})
    with pytest.raises(DataError, match=f"{name}: the data on this machine has digest"):
        evaluate_checkpoint(
            dataclasses.replace(opened, state=state),
            load_site_config(prepared_site),
            kind="standalone",
            want_bpb=True,
            want_core=True,
            micro_batch=4,
            device=CPU,
            collectives=SingleProcess(),
        )


def test_damaged_data_is_named(prepared_site: Path, prepared_data: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared_data, tmp_path / "data/test-v1")
    site_file = tmp_path / "site.json"
    site_file.write_text(json.dumps({"data_root": "data"}))
    site = load_site_config(site_file)
    opened = open_inputs(site, TEST_V1, splits=("val_curve",), want_core=False)
    tokenizer = tmp_path / "data/test-v1/tokenizer.tiktoken.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    rows = tmp_path / "data/test-v1/val_curve" / opened.manifest.splits["val_curve"].files[0].name
    content = bytearray(rows.read_bytes())
    content[40] ^= 1
    rows.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_inputs(site, TEST_V1, splits=("val_curve",), want_core=False)
    assert rows.name in str(caught.value) and "not the tokenizer" in str(caught.value)


def test_a_full_protocol_needs_the_bundle(prepared_site: Path) -> None:
    with pytest.raises(ConfigError, match="'core_bundle' is not set, but formal-v1 evaluates CORE"):
        open_bundle(load_site_config(prepared_site), FORMAL_V1)


@pytest.fixture
def model_and_subject(checkpoint: Path) -> tuple[Any, Subject]:
    opened = open_checkpoint(checkpoint, SingleProcess())
    model = build_model(config_from_dict(opened.model_config), seed=1)
    return model, Subject("0" * 16, "open", "dense_full", 2, None, "1" * 64)


def fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes() + bytes([parameter.requires_grad]))
    return digest.hexdigest()


@pytest.mark.usefixtures("short_prompts")
def test_evaluation_changes_no_training_state(model_and_subject: tuple[Any, Subject], prepared_site: Path) -> None:
    model, subject = model_and_subject
    opened = open_inputs(load_site_config(prepared_site), TEST_V1, splits=("val_curve",), want_core=True)
    model.train()
    before = fingerprint(model)
    record = evaluate_model(
        model,
        opened,
        subject,
        kind="core",
        splits=("val_curve",),
        want_core=True,
        micro_batch=8,
        collectives=SingleProcess(),
        num_bpb_rows=3,
        limit=11,
    )
    assert (record.errors, record.bpb["val_curve"].rows) == ([], 3)
    assert fingerprint(model) == before and model.training
    ids = torch.ones(1, 8, dtype=torch.long)
    model(ids, ids).sum().backward()


def test_a_formal_runs_own_evaluation_is_never_limited(
    model_and_subject: tuple[Any, Subject], prepared_site: Path
) -> None:
    model, subject = model_and_subject
    opened = open_inputs(load_site_config(prepared_site), TEST_V1, splits=(), want_core=True)
    with pytest.raises(ProtocolError, match="--limit"):
        evaluate_model(
            model,
            opened,
            dataclasses.replace(subject, mode="formal"),
            kind="core",
            splits=(),
            want_core=True,
            micro_batch=1,
            collectives=SingleProcess(),
            limit=11,
        )


@pytest.mark.usefixtures("short_prompts")
def test_a_missing_value_is_written_and_ends_in_exit_code_1(
    checkpoint: Path, prepared_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from nexttransformer.evaluation import preparation

    original = preparation.make_questions

    def failing(number: int, task: Any, *rest: Any) -> Any:
        if task.label == "copa":
            raise NextTransformerError("broken on purpose")
        return original(number, task, *rest)

    monkeypatch.setattr(preparation, "make_questions", failing)
    output = tmp_path / "out.json"
    assert evaluate.main(words(checkpoint, output, prepared_site, "--eval", "core")) == 1
    record = EvaluationRecord.read(output)
    assert record.errors == ["copa: broken on purpose"]
    assert record.core is not None and record.core.core_limited is None
    assert [task.num_correct is None for task in record.core.tasks].count(True) == 1
    assert "Missing: copa: broken on purpose" in capsys.readouterr().out


def test_the_table_shows_every_task_and_count_in_80_columns(evaluated: EvaluationRecord) -> None:
    text = io.StringIO()
    print_record(evaluated, Console(file=text, width=80))
    assert evaluated.core is not None
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) < 80 and "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
    shown = {line.split()[0]: line.split() for line in lines if line}
    for task in evaluated.core.tasks:
        assert shown[task.label][1] == f"{100 * (task.accuracy or 0):.2f}"
        assert shown[task.label][4] == f"{task.rows:,}"
    for split, score in evaluated.bpb.items():
        assert any(line.split()[:3] == ["BPB", split, f"{score.bpb:.6f}"] for line in lines if line)
    for name in ("cut", "fallback", "empty", "ties", "limited"):
        assert name in text.getvalue()
