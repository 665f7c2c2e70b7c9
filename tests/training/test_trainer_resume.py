"""Resume is exact, and nothing depends on world size or micro-batch (F01, F02, F03, F18, F19, F22, F23)."""

import json
from pathlib import Path

import pytest

from nexttransformer.training.events import read_events
from nexttransformer.training.metrics import read_metrics
from tests.distributed import run_ranks
from tests.training.trainer_runs import (
    CONFIG,
    arguments,
    checkpoint_tensors,
    events,
    fraction_beyond,
    metrics,
    state,
    train,
    train_rank,
)

OK = (0, "")


def stop_after(update: int, folder: Path) -> list[tuple[str, int, int, str]]:
    # The stop file is seen at the next update's poll, so it is made while the update's gradients are computed.
    return [("nats", update - 1, 0, f"touch {folder / 'stop_requested'}")]


def test_stop_and_resume_twice_is_bit_identical(prepared_site, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(arguments(prepared_site, whole, micro_batch=3)) == [OK]
    words = arguments(prepared_site, parts, micro_batch=3)
    assert train(words, faults=stop_after(7, parts)) == [OK]
    assert state(parts)["status"] == "stopped" and state(parts)["update"] == 7
    assert (parts / "checkpoint_00000007/complete.json").exists()
    assert train(words, faults=stop_after(13, parts)) == [OK]
    assert not (parts / "stop_requested").exists() or state(parts)["update"] == 13
    assert train(words) == [OK]
    assert not (parts / "stop_requested").exists()

    # Rates, hashes and chain are compared as the strings that were written.
    assert metrics(whole) == metrics(parts)
    assert len(metrics(parts)) == 20
    first, second = (checkpoint_tensors(folder / "checkpoint_00000020") for folder in (whole, parts))
    assert first.keys() == second.keys() and any("::" in name for name in first)
    assert all(first[name].equal(second[name]) for name in first)
    digests = [events(folder, "checkpoint_saved")[-1]["meta"]["weights_digest"] for folder in (whole, parts)]
    assert digests[0] == digests[1]
    starts = events(parts, "attempt_start")
    assert [start["meta"]["resumed_update"] for start in starts] == [0, 7, 13]
    assert (
        starts[1]["meta"]["resumed_complete_digest"] == events(parts, "checkpoint_saved")[1]["meta"]["complete_digest"]
    )
    assert state(parts)["status"] == "finished"
    # Nothing is left to do, and nothing is written.
    before = (parts / "events.jsonl").read_bytes()
    assert train(words) == [OK]
    assert (parts / "events.jsonl").read_bytes() == before


@pytest.mark.dist
def test_world_size_and_micro_batch_change_nothing_but_rounding(prepared_site, tmp_path):
    results = {}
    for world_size, micro_batch in ((1, 8), (1, 3), (2, 1), (3, 8), (4, 3)):
        folder = tmp_path / f"{world_size}x{micro_batch}"
        words = arguments(prepared_site, folder, "--updates", "4", micro_batch=micro_batch)
        fill = [("initialized", 0, rank, "fill") for rank in range(world_size)]
        assert train(words, world_size=world_size, faults=fill) == [OK] * world_size
        lines = metrics(folder)
        assert all((line["rows"], line["tokens"]) == (8, 1024) for line in lines)
        results[world_size, micro_batch] = (lines, checkpoint_tensors(folder / "checkpoint_00000004"))
    expected, tensors = results.pop((1, 8))
    exact = ("update", "rows_hash", "data_chain", "learning_rates", "muon_momentum", "muon_weight_decay", "tokens_seen")
    for case, (lines, found) in results.items():
        assert [[line[key] for key in exact] for line in lines] == [[line[key] for key in exact] for line in expected]
        losses = [line["loss_nats"] for line in lines]
        assert losses == pytest.approx([line["loss_nats"] for line in expected], abs=1e-5), case
        # With three ranks the loss is scaled by 3 and divided again, so every product rounds otherwise.
        assert fraction_beyond(found, tensors, 1e-4) < (1e-2 if case[0] == 3 else 1e-3), case


@pytest.mark.slow
@pytest.mark.dist
def test_resume_at_other_world_sizes(prepared_site, tmp_path):
    straight, mixed = tmp_path / "straight", tmp_path / "mixed"
    fill = [("initialized", 0, rank, "fill") for rank in range(4)]
    assert train(arguments(prepared_site, straight, "--updates", "8"), faults=fill) == [OK]
    words = arguments(prepared_site, mixed, "--updates", "8", micro_batch=2)
    for world_size, until in ((2, 2), (1, 4), (4, 6), (2, None)):
        faults = [*fill, *(stop_after(until, mixed) if until else [])]
        assert train(words, world_size=world_size, faults=faults) == [OK] * world_size
    keys = ("update", "rows_hash", "data_chain", "learning_rates")
    lines = [[[line[key] for key in keys] for line in metrics(folder)] for folder in (straight, mixed)]
    assert lines[0] == lines[1]
    first, second = (checkpoint_tensors(folder / "checkpoint_00000008") for folder in (straight, mixed))
    assert fraction_beyond(first, second, 1e-4) < 1e-3


@pytest.mark.dist
def test_killed_while_evaluating(prepared_site, tmp_path):
    words = arguments(prepared_site, tmp_path / "run", "--updates", "6", "--eval", "bpb")
    with pytest.raises(AssertionError, match="died"):
        run_ranks(train_rank, 1, words, [("evaluating", 5, 0, "SIGKILL")], with_group=False)
    folder = tmp_path / "run"
    assert (folder / "checkpoint_00000005/complete.json").exists()
    assert not (folder / "evaluations/val_curve_00000005.json").exists()
    assert state(folder)["status"] == "running"
    assert train(words) == [OK]
    found = [event["meta"]["file"] for event in events(folder, "evaluation")]
    names = [f"evaluations/{name}.json" for name in ("val_curve_00000000", "val_curve_00000005", "val_curve_00000006")]
    assert found == [*names, "evaluations/final.json"]
    assert all((folder / name).exists() for name in found)


def test_torn_last_lines_are_closed(prepared_site, tmp_path):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "4")
    assert train(words, faults=stop_after(2, folder)) == [OK]
    kept = {}
    for name in ("events.jsonl", "metrics.jsonl"):
        content = (folder / name).read_bytes()
        kept[name] = content[: content.rindex(b"{") + 40]
        (folder / name).write_bytes(kept[name])
    assert train(words) == [OK]
    log, lines = read_events(folder / "events.jsonl"), read_metrics(folder / "metrics.jsonl")
    assert not log.problems and not log.chain_problems and len(log.torn_lines) == 1
    assert not lines.problems and len(lines.torn_lines) == 1
    assert [line.update for line in lines.records] == [1, 3, 4]
    # Old lines stay as they were.
    assert all((folder / name).read_bytes().startswith(content + b"\n") for name, content in kept.items())


def test_a_lost_log_is_refused_and_can_be_left_behind(prepared_site, tmp_path):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "3")
    assert train(words, faults=stop_after(2, folder)) == [OK]
    (folder / "events.jsonl").write_bytes(b"")
    ((code, message),) = train(words)
    assert code == 2 and "events.jsonl: holds no attempt, but checkpoint_00000002 is complete" in message
    assert (folder / "events.jsonl").read_bytes() == b""
    other = arguments(prepared_site, tmp_path / "other", "--updates", "3")
    assert train([*other, "--resume", str(folder / "checkpoint_00000002")]) == [OK]


def test_another_run_is_refused(prepared_site, tmp_path):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "3")
    assert train(words, faults=stop_after(1, folder)) == [OK]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def refusal(*more: str, config: Path = CONFIG) -> str:
        ((code, message),) = train(arguments(prepared_site, folder, *more, config=config))
        assert code == 2
        return message

    sssl = CONFIG.with_name("sssl.json")
    assert "sssl" in refusal("--updates", "3", config=sssl)
    assert "seed" in refusal("--updates", "3", "--seed", "5")
    assert "num_updates" in refusal("--updates", "4")
    assert "this run is open" in refusal("--smoke-steps", "2")
    assert "not empty" in refusal("--updates", "3", "--resume", "never")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_smoke_stays_smoke(prepared_site, tmp_path):
    folder = tmp_path / "run"
    assert train(arguments(prepared_site, folder, "--smoke-steps", "2")) == [OK]
    assert json.loads((folder / "run.json").read_text())["smoke_updates"] == 2
    # Rates are those of the whole schedule's first updates.
    assert [line["learning_rates"][0] for line in metrics(folder)] == pytest.approx([0.005, 0.01])
    assert [event["value"] for event in events(folder, "evaluation")] == ["val_curve"]
    assert sorted(path.name for path in (folder / "evaluations").iterdir()) == ["val_curve_00000002.json"]
    ((code, message),) = train(arguments(prepared_site, folder))
    assert code == 2 and "this run is smoke and stays so" in message


def test_resume_from_a_named_checkpoint(prepared_site, tmp_path):
    folder = tmp_path / "run"
    words = arguments(prepared_site, folder, "--updates", "4")
    for update in (2, 3):
        assert train(words, faults=stop_after(update, folder)) == [OK]
    ((code, message),) = train([*words, "--resume", str(folder / "logs")])
    assert code == 2 and "complete.json" in message
    assert train([*words, "--resume", str(folder / "checkpoint_00000002")]) == [OK]
    assert (folder / "rejected_checkpoint_00000003").is_dir()
    assert [start["meta"]["resumed_update"] for start in events(folder, "attempt_start")] == [0, 2, 2]
    assert [line["update"] for line in metrics(folder)] == [1, 2, 3, 4]
