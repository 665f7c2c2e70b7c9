import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from nexttransformer import jsonio
from nexttransformer.errors import CheckpointError, RunFailure
from nexttransformer.training.checkpoint import SaveFailed, SaveRefused, expected_bytes
from nexttransformer.training.checkpoint_choice import choose_checkpoint
from nexttransformer.training.checkpoint_load import load_checkpoint, load_for_evaluation
from nexttransformer.training.collectives import GroupCollectives, SingleProcess
from tests.distributed import RanksFailed, run_ranks
from tests.training.run_helpers import (
    CONFIG,
    RUN_ID,
    FakeOptimizer,
    make_parameters,
    make_record,
    make_state,
    save,
)

ONE = SingleProcess()
SMALL_FILES = ["model_config.json", "optimizer_index.json", "protocol.json", "trainer_state.json"]


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


def crash_at(step: str) -> Any:
    def hook(name: str) -> None:
        if name == step:
            raise Crash(step)

    return hook


def choose(root: Path, resume: str = "auto", **changes: Any) -> Any:
    return choose_checkpoint(root, make_record(**changes), resume, ONE)


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def assert_loads(root: Path, update: int, choice: Any) -> None:
    """The chosen checkpoint gives back exactly the state that belongs to `update`."""
    assert choice.update == update
    parameters = {name: torch.zeros_like(tensor) for name, tensor in make_parameters().items()}
    optimizer = FakeOptimizer(parameters, 0)
    load_checkpoint(choice, parameters, optimizer, ONE, "host")
    expected = make_parameters(update)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    state = FakeOptimizer(expected, update)
    assert all(torch.equal(optimizer.state[key], state.state[key]) for key in state.state)
    assert optimizer.num_updates_done == update
    assert choice.state == make_state(update)


def test_a_saved_checkpoint_holds_what_the_specification_lists(tmp_path: Path) -> None:
    saved = save(tmp_path, 5)
    assert saved.path == tmp_path / "checkpoint_00000005"
    assert sorted(file.name for file in saved.path.iterdir()) == sorted(
        ["complete.json", "model.safetensors", "optimizer_00000_of_00001.safetensors", *SMALL_FILES]
    )
    content = folder_bytes(saved.path)
    marker = json.loads(content["complete.json"])
    assert hashlib.sha256(content["complete.json"]).hexdigest() == saved.complete_digest == jsonio.digest(marker)
    assert marker["schema"] == "nexttransformer.complete/1"
    assert {entry["path"]: (entry["bytes"], entry["sha256"]) for entry in marker["files"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in content.items() if name != "complete.json"
    }
    # The library reads what we wrote, and agrees on every bit.
    tensors = safetensors.torch.load(content["model.safetensors"])
    expected = make_parameters(5)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    with safetensors.safe_open(str(saved.path / "model.safetensors"), "pt") as file:
        assert file.metadata() == {
            "run_id": RUN_ID,
            "mode": "open",
            "method": "toy",
            "protocol": "test-v1",
            "update": "5",
        }
    index = json.loads(content["optimizer_index.json"])["parameters"]
    assert index.keys() == expected.keys()
    assert index["lm_head.weight"] == {
        "file": "optimizer_00000_of_00001.safetensors",
        "group": "matrix",
        "states": {"momentum": {"dtype": "F32", "shape": [64, 8]}, "second": {"dtype": "F32", "shape": [64]}},
    }
    assert saved.num_bytes == sum(len(data) for name, data in content.items() if name != "complete.json")
    estimate = expected_bytes(expected, FakeOptimizer(expected, 5))
    assert saved.num_bytes <= estimate <= saved.num_bytes + 100_000
    assert_loads(tmp_path, 5, choose(tmp_path))


def test_saving_is_reproducible_and_needs_no_hidden_state(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert folder_bytes(save(tmp_path / "a", 5).path) == folder_bytes(save(tmp_path / "b", 5).path)


def steps_of_a_save(root: Path) -> list[str]:
    steps: list[str] = []
    save(root, 5, hook=steps.append)
    return steps


def test_crash_after_every_step_of_a_save(tmp_path: Path) -> None:
    """F04: whatever step was the last, the relaunch picks the right checkpoint and the save works again."""
    (tmp_path / "steps").mkdir()
    steps = steps_of_a_save(tmp_path / "steps")
    files = ["model.safetensors", "optimizer_00000_of_00001.safetensors", *SMALL_FILES]
    assert sorted(steps) == sorted(
        ["partial_made", *(f"file:{name}" for name in files), "gathered", "folder_durable", "folder_renamed"]
        + ["marker_written"]
    )
    for step in steps:
        root = tmp_path / step.replace(":", "_")
        root.mkdir()
        save(root, 5)
        before = folder_bytes(root / "checkpoint_00000005")
        with pytest.raises(Crash):
            save(root, 10, hook=crash_at(step))
        choice = choose(root)
        assert_loads(root, 10 if step == "marker_written" else 5, choice)
        assert not list(root.glob("*.partial"))
        if step == "folder_renamed":
            (skipped,) = choice.skipped
            assert skipped.reason == "incomplete"
            assert skipped.message == (
                f"{root / 'checkpoint_00000010'} is incomplete (complete.json missing). Skipped; resuming from "
                "checkpoint_00000005."
            )
        if step != "marker_written":
            save(root, 10)
        assert_loads(root, 10, choose(root))
        assert folder_bytes(root / "checkpoint_00000005") == before
        assert sorted(path.name for path in root.iterdir()) == ["checkpoint_00000005", "checkpoint_00000010"]


def test_a_complete_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 5)
    before = folder_bytes(tmp_path / "checkpoint_00000005")
    with pytest.raises(SaveFailed, match="never overwritten") as caught:
        save(tmp_path, 5)
    assert caught.value.reason == "exists"
    assert folder_bytes(tmp_path / "checkpoint_00000005") == before


def truncate(path: Path) -> str:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    return "model.safetensors"


def flip_bit(path: Path) -> str:
    file = path / "optimizer_00000_of_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return file.name


def rename_file(path: Path) -> str:
    (path / "trainer_state.json").rename(path / "trainer_state_old.json")
    return "trainer_state.json"


def cut_marker(path: Path) -> str:
    os.truncate(path / "complete.json", 200)
    return "complete.json"


def replace_by_other_update(path: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("checkpoint_00000005"), path)
    return "complete.json"


def replace_by_other_run(path: Path) -> str:
    shutil.rmtree(path)
    save(path.parent, 10, state=make_state(10, run_id="f" * 16))
    return "complete.json"


@pytest.mark.parametrize(
    "harm", [truncate, flip_bit, rename_file, cut_marker, replace_by_other_update, replace_by_other_run]
)
def test_a_damaged_checkpoint_is_put_aside_and_the_older_one_used(tmp_path: Path, harm: Any) -> None:
    """F06."""
    save(tmp_path, 5)
    save(tmp_path, 10)
    newest = tmp_path / "checkpoint_00000010"
    file = harm(newest)
    with pytest.raises(CheckpointError, match=f"--resume .*checkpoint_00000010.*{file}"):
        choose(tmp_path, str(newest))
    choice = choose(tmp_path)
    assert_loads(tmp_path, 5, choice)
    (skipped,) = choice.skipped
    assert skipped.file == file and file in skipped.message and str(newest) in skipped.message
    assert skipped.message.endswith("Skipped; resuming from checkpoint_00000005.")
    assert not newest.exists() and (tmp_path / "rejected_checkpoint_00000010").is_dir()
    save(tmp_path, 10)
    assert_loads(tmp_path, 10, choose(tmp_path))


def test_a_missing_marker_is_skipped_and_the_name_is_free_again(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    (tmp_path / "checkpoint_00000010" / "complete.json").unlink()
    assert_loads(tmp_path, 5, choose(tmp_path))
    save(tmp_path, 10)
    assert_loads(tmp_path, 10, choose(tmp_path))
    assert not list(tmp_path.glob("rejected_*"))


def test_nothing_complete_starts_at_0_and_says_so(tmp_path: Path) -> None:
    assert choose(tmp_path).message == f"Starting at update 0 in {tmp_path}."
    (tmp_path / "events.jsonl").write_text("")
    choice = choose(tmp_path)
    assert choice.path is None and choice.update == 0 and "all updates are repeated" in choice.message


def test_differences_from_the_run_are_errors_never_skips(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(CheckpointError) as caught:
        choose(tmp_path, seed=43, mode="smoke", smoke_updates=2, config_digest="0" * 64)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "mode: the checkpoint has 'open', the run has 'smoke'" in lines[0]
    assert "seed: the checkpoint has 42, the run has 43" in lines[1]
    assert "config digest" in lines[2]
    assert (tmp_path / "checkpoint_00000005").is_dir()


def test_an_older_named_checkpoint_supersedes_newer_ones(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    choice = choose(tmp_path, str(tmp_path / "checkpoint_00000005"))
    assert choice.update == 5 and [skipped.reason for skipped in choice.skipped] == ["superseded"]
    assert (tmp_path / "rejected_checkpoint_00000010").is_dir()
    save(tmp_path, 10)
    assert choose(tmp_path).update == 10


def test_a_moved_checkpoint_is_used_by_resume_path_and_evaluation(tmp_path: Path) -> None:
    """F24."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 5)
    moved = tmp_path / "handpicked"
    shutil.move(tmp_path / "run" / "checkpoint_00000005", moved)
    (tmp_path / "new").mkdir()
    choice = choose_checkpoint(tmp_path / "new", make_record(), str(moved), ONE)
    assert_loads(tmp_path / "new", 5, choice)
    loaded = load_for_evaluation(moved)
    assert loaded.model_config == CONFIG and loaded.protocol.id == "test-v1" and loaded.state == make_state(5)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in make_parameters(5).items())
    with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
        choose(tmp_path, str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="is incomplete"):
        load_for_evaluation(tmp_path)
    truncate(moved)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected \d+ bytes, found"):
        load_for_evaluation(moved)


def test_loading_is_strict_both_ways_and_lists_all_differences(tmp_path: Path) -> None:
    save(tmp_path, 5)
    parameters = make_parameters()
    parameters["extra"] = parameters.pop("resid_lambdas")
    parameters["lm_head.weight"] = torch.zeros(64, 9)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(choose(tmp_path), parameters, FakeOptimizer(parameters), ONE, "host")
    text = str(caught.value)
    assert "'extra' is missing" in text and "'resid_lambdas' is not expected" in text
    assert "'lm_head.weight': expected F32 [64, 9], found F32 [64, 8]" in text
    assert all(torch.equal(parameters[name], before[name]) for name in before)


def test_optimizer_state_is_strict_both_ways(tmp_path: Path) -> None:
    save(tmp_path, 5)
    parameters = make_parameters()
    optimizer = FakeOptimizer(parameters)
    del optimizer.state["lm_head.weight::second"]
    with pytest.raises(CheckpointError, match="'lm_head.weight::second' is not expected"):
        load_checkpoint(choose(tmp_path), parameters, optimizer, ONE, "host")


def test_non_finite_weights_are_never_saved(tmp_path: Path) -> None:
    parameters = make_parameters(5)
    parameters["lm_head.weight"][3, 4] = float("nan")
    with pytest.raises(SaveRefused, match="not finite on rank 0 .*lm_head.weight") as caught:
        save(tmp_path, 5, parameters=parameters)
    assert caught.value.reason == "nonfinite_weights"
    assert list(tmp_path.iterdir()) == []


def test_a_lost_lock_stops_a_save_without_writing(tmp_path: Path) -> None:
    def lost() -> None:
        raise RunFailure("train.lock belongs to another launch")

    with pytest.raises(SaveRefused, match="belongs to another launch") as caught:
        save(tmp_path, 5, check_lock=lost)
    assert caught.value.reason == "lock_lost"
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SaveFailed, match=r"needed [\d,]+ bytes, free 1,000 bytes on /") as caught:
        save(tmp_path, 10)
    assert caught.value.reason == "space"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_00000005"]


_FILE_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from tests.training.run_helpers import make_parameters, save
from nexttransformer.training.checkpoint import SaveFailed
root = Path(sys.argv[1])
save(root, 5)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, 4 * 2**20))
parameters = make_parameters(10)
parameters["lm_head.weight"] = torch.zeros(1500, 1024)
try:
    save(root, 10, parameters=parameters)
except SaveFailed as error:
    print(error.reason, error.file)
    print(error)
save(root, 15)
"""


def test_a_file_size_limit_fails_cleanly(tmp_path: Path) -> None:
    """F12: 4 MiB limit, a 6 MB weights file."""
    result = subprocess.run(
        [sys.executable, "-c", _FILE_LIMIT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    reason, message = result.stdout.splitlines()
    assert reason == "write model.safetensors"
    assert "File too large" in message and "bytes free" in message and "Older checkpoints are untouched" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_00000005", "checkpoint_00000015"]
    assert_loads(tmp_path, 15, choose(tmp_path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted by root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_fails_cleanly(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F12: the estimate is refused; and where it is fooled, the write itself fails and leaves nothing."""
    save(small_disk, 5)
    parameters = make_parameters(10)
    parameters["lm_head.weight"] = torch.zeros(1500, 1024)
    with pytest.raises(SaveFailed, match=f"needed .* free .* on {small_disk}") as caught:
        save(small_disk, 10, parameters=parameters)
    assert caught.value.reason == "space"
    monkeypatch.setattr("nexttransformer.training.checkpoint_write.check_save_space", lambda root, num_bytes: None)
    with pytest.raises(SaveFailed, match="No space left on device") as caught:
        save(small_disk, 10, parameters=parameters)
    assert caught.value.reason == "write"
    assert [path.name for path in small_disk.iterdir()] == ["checkpoint_00000005"]
    assert_loads(small_disk, 5, choose(small_disk))
    save(small_disk, 15)


# Two processes.


def save_together(rank: int, world_size: int, root: str) -> str:
    collectives = GroupCollectives()
    return save(Path(root), 5, collectives=collectives).complete_digest


def load_together(rank: int, world_size: int, root: str) -> tuple[int, str, str, str]:
    collectives = GroupCollectives()
    choice = choose_checkpoint(Path(root), make_record(), "auto", collectives)
    parameters = {name: torch.zeros_like(tensor) for name, tensor in make_parameters().items()}
    optimizer = FakeOptimizer(parameters, 0, rank=rank, world_size=world_size)
    load_checkpoint(choice, parameters, optimizer, collectives, "host")
    total = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in parameters.values())).hexdigest()
    state = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in optimizer.state.values())).hexdigest()
    return choice.update, total, state, choice.skipped[0].message if choice.skipped else ""


@pytest.mark.dist
def test_two_ranks_write_together_and_any_number_reads(tmp_path: Path) -> None:
    digests = run_ranks(save_together, 2, str(tmp_path))
    assert digests[0] == digests[1]
    names = [file.name for file in (tmp_path / "checkpoint_00000005").glob("optimizer_0*")]
    assert sorted(names) == ["optimizer_00000_of_00002.safetensors", "optimizer_00001_of_00002.safetensors"]
    assert_loads(tmp_path, 5, choose(tmp_path))
    save(tmp_path, 10)
    file = flip_bit(tmp_path / "checkpoint_00000010")
    first, second = run_ranks(load_together, 2, str(tmp_path))
    assert first == second
    assert first[0] == 5 and file in first[3]


def save_with_one_bit_changed(rank: int, world_size: int, root: str) -> tuple[str, str]:
    parameters = make_parameters(5)
    if rank == 1:
        parameters["lm_head.weight"].view(torch.int32)[10, 3] ^= 1
    try:
        save(Path(root), 5, collectives=GroupCollectives(), parameters=parameters)
    except SaveRefused as error:
        return error.reason, str(error)
    raise AssertionError("saved")


@pytest.mark.dist
def test_one_changed_bit_on_rank_1_refuses_the_save(tmp_path: Path) -> None:
    """F20."""
    first, second = run_ranks(save_with_one_bit_changed, 2, str(tmp_path))
    assert first == second and first[0] == "ranks_differ"
    assert "rank 1 on " in first[1] and "lm_head.weight" in first[1]
    assert list(tmp_path.iterdir()) == []


def save_with_a_limit_on_rank_1(rank: int, world_size: int, root: str) -> str:
    collectives = GroupCollectives()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    try:
        save(Path(root), 10, collectives=collectives)
    except SaveFailed as error:
        return str(error)
    raise AssertionError("saved")


def die_on_rank_1(rank: int, world_size: int, root: str) -> None:
    def hook(step: str) -> None:
        if rank == 1 and step.startswith("file:optimizer_"):
            os._exit(9)

    save(Path(root), 10, collectives=GroupCollectives(), hook=hook)


@pytest.mark.dist
def test_a_failure_of_one_writer_fails_all_and_a_dead_writer_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 5)
    messages = run_ranks(save_with_a_limit_on_rank_1, 2, str(tmp_path))
    assert messages[0] == messages[1] and "optimizer_00001_of_00002.safetensors" in messages[0]
    assert "rank 1 on " in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_00000005"]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die_on_rank_1, 2, str(tmp_path))
    assert caught.value.exit_codes[1] == 9
    assert_loads(tmp_path, 5, choose(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_00000005"]
