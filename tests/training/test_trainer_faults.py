"""What stops a run: requests, non-finite numbers, missing gradients, lost ranks (F08, F11, F13, F15, F21)."""

import dataclasses
import json
import shutil
import socket
from typing import NamedTuple

import pytest
import torch

from nexttransformer import prepare_data
from nexttransformer.errors import RunFailure
from nexttransformer.training import saving, trackers
from nexttransformer.training.metrics import MetricsLine, MetricsWriter
from nexttransformer.training.save_errors import SaveFailed
from tests.distributed import RanksFailed
from tests.training.trainer_runs import SHORT, arguments, checkpoint_tensors, events, metrics, state, train

OK = (0, "")


@pytest.mark.dist
def test_every_kind_of_stop_saves_the_same_update_on_all_ranks(prepared_site, tmp_path):
    folder = tmp_path / "run"
    # One pass per update, so that each signal is sent once: a second SIGINT would end the process.
    words = arguments(prepared_site, folder, "--updates", "6", micro_batch=8)
    cases = [
        (2, 1, "SIGTERM", 2),
        (3, 1, "SIGUSR1", 2),
        (4, 0, "SIGINT", 1),
        (5, 0, f"touch {folder / 'stop_requested'}", 1),
    ]
    for update, rank, what, world_size in cases:
        assert train(words, world_size=world_size, faults=[("nats", update - 1, rank, what)]) == [OK] * world_size
        assert (state(folder)["status"], state(folder)["update"]) == ("stopped", update)
        assert (folder / f"checkpoint_{update:08d}/complete.json").exists()
        assert events(folder, "attempt_end")[-1]["value"] == "stopped"
    found = [(event["update"], event["meta"]["rank"], event["value"]) for event in events(folder, "stop_requested")]
    sources = ("SIGTERM", "SIGUSR1", "SIGINT", "stop_file")
    assert found == [(case[0], case[1], source) for case, source in zip(cases, sources, strict=True)]
    assert (folder / "stop_requested").exists()
    assert train(words) == [OK]
    assert not (folder / "stop_requested").exists()
    assert state(folder)["status"] == "finished"
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_time_limit(prepared_site, tmp_path):
    words = arguments(prepared_site, tmp_path / "run", "--updates", "6", "--stop-minutes", "0.0001")
    assert train(words) == [OK]
    assert state(tmp_path / "run")["update"] == 1
    assert events(tmp_path / "run", "stop_requested")[0]["value"] == "time_limit"


def test_saves_by_time(prepared_site, tmp_path):
    words = arguments(
        prepared_site, tmp_path / "run", "--updates", "3", "--save-minutes", "0", "--keep-checkpoints", "1"
    )
    assert train(words) == [OK]
    saved = events(tmp_path / "run", "checkpoint_saved")
    assert [(event["update"], event["meta"]["reason"]) for event in saved] == [(1, "time"), (2, "time"), (3, "final")]
    assert [path.name for path in sorted((tmp_path / "run").glob("checkpoint_*"))] == ["checkpoint_00000003"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "world_size", "meta"),
    [
        (("nats", 3, 1, "nan"), 2, {"ranks": [1], "update": 4, "parameters": []}),
        (("gradients", 3, 0, "infinite_gradient"), 1, {"ranks": [], "update": 4, "parameters": ["lm_head.weight"]}),
    ],
    ids=["loss", "gradient"],
)
def test_nonfinite_numbers_stop_all_ranks_before_the_update(prepared_site, tmp_path, fault, world_size, meta):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "6", micro_batch=4)
    # Save at update 2, which no later save replaces.
    assert train(words, faults=[("nats", 1, 0, "SIGTERM")]) == [OK]
    assert train(words, world_size=world_size, faults=[fault]) == [(1, "")] * world_size
    (event,) = events(folder, "nonfinite")
    assert event["update"] == 3 and event["meta"] == meta
    assert (state(folder)["status"], state(folder)["update"]) == ("failed", 3)
    assert events(folder, "attempt_end")[-1]["value"] == "failed"
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3]
    tensors = checkpoint_tensors(folder / "checkpoint_00000002")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert not (folder / "train.lock").exists()


def test_a_missing_gradient_is_an_error_by_name(prepared_site, tmp_path, capsys, monkeypatch):
    from nexttransformer.models.decoder import Decoder

    original = Decoder.forward

    def forward(self, ids_BT, targets_BT=None):
        with torch.no_grad():
            kept = self.backout_lambda.clone()
        self.backout_lambda.requires_grad_(False)
        try:
            return original(self, ids_BT, targets_BT)
        finally:
            self.backout_lambda.requires_grad_(True)
            assert self.backout_lambda.equal(kept)

    monkeypatch.setattr(Decoder, "forward", forward)
    assert train(arguments(prepared_site, tmp_path / "run", "--updates", "2")) == [(1, "")]
    assert "No gradient after the first backward pass: backout_lambda." in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_was_lost_is_an_error_by_name(prepared_site, tmp_path, world_size, capsys):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "6", micro_batch=4)
    faults = [("gradients", 4, rank, "zero_gradient") for rank in range(world_size)]
    assert train(words, world_size=world_size, faults=faults) == [(1, "")] * world_size
    if world_size == 1:
        assert "failed: The gradient is zero everywhere for x0_lambdas. Either" in capsys.readouterr().err
    assert (state(folder)["status"], state(folder)["update"]) == ("failed", 4)
    # At update 0 most gradients are zero, as they should be.
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]


def test_too_little_space_is_refused_before_update_1(prepared_site, tmp_path, monkeypatch):
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    ((code, message),) = train(arguments(prepared_site, tmp_path / "run"))
    assert code == 2
    assert "too little space for 3 checkpoints" in message and "free 1,000 bytes" in message
    assert not (tmp_path / "run/run.json").exists() and not (tmp_path / "run/train.lock").exists()


def test_too_little_data_is_refused_before_update_1(tmp_path):
    site = tmp_path / "site.json"
    site.write_text(json.dumps({"data_root": "data", "cache_root": "cache"}))
    words = ["--protocol", "test-v1", "--site-config", str(site), "--workers", "1", "--updates", "6"]
    assert prepare_data.main(words) == 0
    ((code, message),) = train(arguments(site, tmp_path / "run"))
    assert code == 2
    assert "20 updates x 8 rows need 160 rows, 48 are stored (6 updates)" in message
    assert not (tmp_path / "run/run.json").exists()


@pytest.mark.dist
def test_a_damaged_row_is_named_on_all_ranks(prepared_site, tmp_path):
    shutil.copytree(prepared_site.parent / "data", tmp_path / "data")
    site = tmp_path / "site.json"
    site.write_text(json.dumps({"data_root": "data", "cache_root": "cache"}))
    path = (
        next((tmp_path / "data/test-v1/train").glob("*.rows.*"), None)
        or sorted((tmp_path / "data/test-v1/train").iterdir(), key=lambda file: file.stat().st_size)[-1]
    )
    content = bytearray(path.read_bytes())
    content[129 * 2 * (2 * 8 + 6) + 10] ^= 1
    path.write_bytes(content)
    words = arguments(site, tmp_path / "run", "--updates", "6", micro_batch=4)
    assert train(words, world_size=2) == [(1, ""), (1, "")]
    assert [line["update"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert state(tmp_path / "run")["status"] == "failed"


def test_trackers_may_fail(prepared_site, tmp_path, monkeypatch, capsys):
    class Broken:
        def __init__(self, *arguments: object) -> None:
            pass

        def log(self, values: dict[str, float], update: int) -> None:
            raise ConnectionError("no network")

        def close(self) -> None:
            raise SystemExit(3)

    def absent(*arguments: object) -> trackers.Tracker:
        raise ImportError("No module named 'trackio'")

    logged: list[tuple[int, float]] = []

    class Good(Broken):
        def log(self, values: dict[str, float], update: int) -> None:
            logged.append((update, values["train/loss_nats"]))

    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": Broken, "trackio": absent, "tensorboard": Good})
    site = tmp_path / "site.json"
    root = prepared_site.parent / "data"
    names = ["wandb", "trackio", "tensorboard"]
    site.write_text(json.dumps({"data_root": str(root), "cache_root": "cache", "trackers": names}))
    folder = tmp_path / "run"
    words = arguments(site, folder, "--updates", "4")
    assert train(words, faults=[("nats", 1, 0, "SIGTERM")]) == [OK]
    before = (folder / "metrics.jsonl").read_bytes()
    assert train(words) == [OK]
    assert (folder / "metrics.jsonl").read_bytes().startswith(before)
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]
    assert logged == [(line["update"], line["loss_nats"]) for line in metrics(folder)]
    errors = capsys.readouterr().err
    assert "tracker wandb switched off (ConnectionError: no network)" in errors
    assert "tracker trackio switched off (ImportError: No module named 'trackio')" in errors


def fail_saves(monkeypatch: pytest.MonkeyPatch, updates: set[int]) -> list[int]:
    """Makes every save of these updates fail cleanly; returns the list of all tries."""
    original, tries = saving.save_checkpoint, []

    def save(root, *, state, **rest):
        tries.append(state.update)
        if state.update in updates:
            raise SaveFailed("No space.", "space", None)
        return original(root, state=state, **rest)

    monkeypatch.setattr(saving, "save_checkpoint", save)
    return tries


def test_one_failed_save_leaves_the_run_going(prepared_site, tmp_path, monkeypatch):
    tries = fail_saves(monkeypatch, {2})
    words = arguments(prepared_site, tmp_path / "run", "--updates", "4", "--save-minutes", "0")
    assert train(words, limits=SHORT) == [OK]
    assert tries == [1, 2, 3, 4]
    (failed,) = events(tmp_path / "run", "save_failed")
    assert (failed["update"], failed["meta"]) == (2, {"reason": "space", "file": None})
    assert [event["update"] for event in events(tmp_path / "run", "checkpoint_saved")] == [1, 3, 4]


@pytest.mark.parametrize(
    ("failing", "expected", "safe"),
    [
        ({1}, [1], "No complete checkpoint exists yet."),
        ({2, 3}, [1, 2, 3], "Still safe: checkpoint_00000001."),
        # The final save is retried ten times.
        ({3}, [1, 2, *[3] * 11], "Still safe: checkpoint_00000002."),
    ],
    ids=["first", "two in a row", "final"],
)
def test_failed_saves_that_end_the_run(prepared_site, tmp_path, monkeypatch, capsys, failing, expected, safe):
    tries = fail_saves(monkeypatch, failing)
    num_updates = "3" if failing == {3} else "4"
    words = arguments(prepared_site, tmp_path / "run", "--updates", num_updates, "--save-minutes", "0")
    assert train(words, limits=dataclasses.replace(SHORT, retry_final_save=0.0)) == [(1, "")]
    assert tries == expected
    assert state(tmp_path / "run")["status"] == "failed"
    assert f"No space. {safe}" in capsys.readouterr().err


def test_a_lost_metrics_line_stops_and_saves(prepared_site, tmp_path, monkeypatch, capsys):
    original = MetricsWriter.write

    def write(self: MetricsWriter, line: MetricsLine) -> None:
        if line.update == 2:
            raise RunFailure("metrics.jsonl: cannot be written: No space left on device.")
        original(self, line)

    monkeypatch.setattr(MetricsWriter, "write", write)
    words = arguments(prepared_site, tmp_path / "run", "--updates", "5")
    assert train(words) == [(1, "")]
    assert [path.name for path in tmp_path.glob("run/checkpoint_*")] == ["checkpoint_00000003"]
    assert "No space left on device. Metrics are evidence" in capsys.readouterr().err
    assert state(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "line"),
    [("SIGKILL", "is dead or frozen"), ("sleep", "hangs: no update for"), ("raise", "failed: ValueError: injected")],
)
def test_a_lost_rank_ends_the_job_by_name(prepared_site, tmp_path, rank, what, line):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, micro_batch=4)
    with pytest.raises(RanksFailed) as caught:
        train(words, world_size=2, faults=[("nats", 4, rank, what)], limits=SHORT, limit_seconds=60)
    codes = caught.value.exit_codes
    assert all(code not in (0, None) for code in codes), codes
    survivors = {0, 1} - ({rank} if what == "SIGKILL" else set())
    for each in survivors:
        dump = (folder / f"logs/stacks_rank_{each:05d}.txt").read_text()
        assert dump.startswith(f"Rank {rank} on {socket.gethostname()} ") and "attempt.py" in dump
        assert (line if what != "SIGKILL" or rank == 1 else "is gone") in dump
    if 0 in survivors:
        assert state(folder)["status"] == "failed"
        assert state(folder)["reason"].startswith(f"Rank {rank} on ") and line in state(folder)["reason"]
        assert events(folder, "attempt_end")[-1]["meta"] == {"reason": "rank_lost"}
