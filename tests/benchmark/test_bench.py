"""The whole command on the tiny protocol: figures must be consistent with each other, whatever the machine does."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import bench
from nexttransformer.benchmark import runner
from nexttransformer.benchmark.render import render_text
from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DENSE = str(ROOT / "configs/baseline/dense_full.json")
WINDOWED = str(ROOT / "configs/baseline/sssl.json")
CONTEXT, ROWS = 128, 8


def run(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Runs the command and returns its JSON."""
    output = folder / "bench.json"
    arguments = ["--protocol", "test-v1", "--steps", "2", "--warmup", "1", "--output", str(output), *words]
    assert bench.main(arguments) == code
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two configurations, an odd micro-batch, every part but the slow evaluation."""
    folder = tmp_path_factory.mktemp("bench")
    parts = "roofline,step,update,breakdown,optimizer,communication,data,checkpoint"
    words = ("--config", DENSE, "--config", WINDOWED, "--micro-batch", "3,8", "--parts", parts)
    found = run(folder, *words, "--plot", str(folder / "plot.html"))
    assert list(folder.glob("bench_checkpoint_*")) == []
    found["page"] = (folder / "plot.html").read_text()
    return found


def test_record_says_what_ran_where(record):
    assert (record["schema"], record["is_complete"], record["problems"]) == ("nexttransformer.bench/1", True, [])
    assert record["versions"]["torch"] and record["hardware"]["device"] == "cpu"
    assert record["hardware"]["num_devices"] == 1 and len(record["code"]["source_digest"]) == 64
    assert record["settings"]["state"] == "nonzero" and record["settings"]["micro_batches"] == [3, 8]
    assert [entry["method"] for entry in record["configurations"]] == ["dense_full", "sssl"]
    for entry in record["configurations"]:
        assert len(entry["config_digest"]) == 64
        assert [choice["path"] for choice in entry["kernels"]["choices"]] != []
        assert entry["model"]["num_tensors_made_nonzero"] > 0


def test_speed_times_time_is_tokens(record):
    for entry in record["configurations"]:
        for part in (part for each in entry["runs"] for part in (each["step"], each["update"])):
            seconds = part["seconds"]
            assert seconds["min_seconds"] <= seconds["median_seconds"] <= seconds["max_seconds"]
            assert seconds["num"] >= 2
            assert part["tokens_per_second"] * seconds["median_seconds"] == pytest.approx(part["tokens"])
            # No peak is known of a CPU, so there is no utilization to invent.
            assert part["mfu_causal_exact"] is part["mfu_nominal"] is part["peak_memory_bytes"] is None
        odd, whole = entry["runs"]
        assert (odd["step"]["tokens"], whole["step"]["tokens"]) == (3 * CONTEXT, 8 * CONTEXT)
        # The update is the protocol's, padded or not.
        assert odd["update"]["tokens"] == whole["update"]["tokens"] == ROWS * CONTEXT
        assert (odd["update"]["num_micro_batches"], odd["update"]["num_padded_rows"]) == (3, 1)
        assert (whole["update"]["num_micro_batches"], whole["update"]["num_padded_rows"]) == (1, 0)
        for each in (odd, whole):
            assert 0 <= each["update"]["data_wait_fraction"] <= 1
            assert each["step"]["first_step_seconds"] > 0 and each["step"]["num_graphs"] == 0
            assert each["step"]["compile_cache"] == {"hits": 0, "misses": 0}


def test_shares_sum_to_one_and_name_the_work(record):
    dense, windowed = record["configurations"]
    for each in (*dense["runs"], *windowed["runs"]):
        breakdown = each["breakdown"]
        assert sum(breakdown["update_shares"].values()) == pytest.approx(1)
        assert sum(breakdown["pass_shares"].values()) == pytest.approx(1)
        assert {"products", "optimizer", "idle"} <= breakdown["update_shares"].keys()
        assert "optimizer" not in breakdown["pass_shares"]
        assert breakdown["num_micro_batches"] == each["update"]["num_micro_batches"]
        times = [kernel["seconds"] for kernel in breakdown["kernels"]]
        assert times == sorted(times, reverse=True) and len(times) > 5
    assert dense["runs"][0]["breakdown"]["pass_shares"]["attention"] > 0


def test_roofline_follows_from_its_own_figures(record):
    rate = record["machine"]["product_flops_per_second"]
    # Window -> layers: four full ones, and SSSF plus a last full one.
    for entry, layers in zip(record["configurations"], ({None: 4}, {32: 3, None: 2}), strict=True):
        for each in entry["runs"]:
            bound = each["roofline"]
            kinds = {kind["window"]: kind for kind in bound["attention"]}
            assert kinds.keys() == layers.keys()
            seconds = {window: kind["forward_seconds"] + kind["backward_seconds"] for window, kind in kinds.items()}
            layer_seconds = sum(count * seconds[window] for window, count in layers.items())
            mixing = layer_seconds / (each["micro_batch"] * CONTEXT)
            assert bound["attention_seconds_per_token"] == pytest.approx(mixing)
            total = bound["product_flops_per_token"] / rate + mixing
            assert bound["tokens_per_second"] == pytest.approx(1 / total)
            assert each["roofline_fraction"] == pytest.approx(each["step"]["tokens_per_second"] * total)


def test_parts_of_a_configuration(record):
    for entry in record["configurations"]:
        parts, num_parameters = entry["parts"], entry["model"]["num_parameters"]
        assert parts.keys() == {"optimizer", "communication", "data", "checkpoint"}
        assert parts["communication"]["gradient_bytes"] == 4 * num_parameters
        assert parts["communication"]["sent_bytes_per_rank_and_update"] == 0
        assert parts["communication"]["algorithm_bytes_per_second"] is None
        # Weights, one or two moments each, and small files.
        assert 2 * 4 * num_parameters < parts["checkpoint"]["num_bytes"] < 3 * 4 * num_parameters + 500_000
        saved = parts["checkpoint"]
        assert saved["save_bytes_per_second"] * saved["save_seconds"] == pytest.approx(saved["num_bytes"])
        assert parts["data"]["tokens_per_second"] * parts["data"]["seconds"] == pytest.approx(parts["data"]["tokens"])
        rates = {each["micro_batch"]: each["step"]["tokens_per_second"] for each in entry["runs"]}
        assert entry["best_micro_batch"] == max(rates, key=lambda size: rates[size])
        projection = entry["projection"]
        assert projection["num_gpus"] == 8 and projection["num_micro_batches"] == 1
        assert projection["total_hours"] == pytest.approx(sum(projection["hours"].values()))
        assert projection["hours"].keys() == {"passes", "beside_passes", "saves"}


def test_table_and_plot_show_every_run(record):
    text = render_text(record)
    for word in ("dense_full", "sssl", "percent of a whole update", "products", "device hours", "1 x cpu"):
        assert word in text
    narrow = render_text(record, width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    # Names are whole: nothing is cut to fit.
    assert "dense_full " in narrow and "…" not in narrow
    page = record["page"]
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    labels = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"dense_full, 3 rows", "dense_full, 8 rows", "sssl, 3 rows", "sssl, 8 rows"} <= set(labels)


def test_a_failing_part_is_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    seen = []

    def fail(*arguments):
        # What was measured before is on disk already.
        seen.append(json.loads((tmp_path / "bench.json").read_text()))
        raise ValueError("injected\nsecond line")

    monkeypatch.setattr(runner, "measure_update", fail)
    monkeypatch.setattr(runner, "measure_optimizer", fail)
    words = ("--config", DENSE, "--micro-batch", "8", "--accumulation", "2", "--parts", "step,update,optimizer,data")
    found = run(tmp_path, *words, code=1)
    (entry,) = found["configurations"]
    assert "ValueError: injected second line" in entry["runs"][0]["update"]["error"]
    assert entry["runs"][0]["step"]["tokens_per_second"] > 0 and entry["parts"]["data"]["tokens_per_second"] > 0
    assert [problem.split(":")[0] for problem in found["problems"]] == ["dense_full, micro-batch 8", "dense_full"]
    assert "not measured: dense_full: optimizer: ValueError" in capsys.readouterr().out
    for partial in seen:
        assert not partial["is_complete"]
        assert partial["configurations"][0]["runs"][0]["step"]["tokens_per_second"] > 0


def test_a_step_that_fails_skips_what_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "measure_step", lambda *_: 1 / 0)
    words = ("--config", DENSE, "--micro-batch", "4", "--parts", "step,update,breakdown,roofline,tiles")
    entry = run(tmp_path, *words, code=1)["configurations"][0]
    (only,) = entry["runs"]
    assert only["update"] == only["breakdown"] == {"error": "skipped, since the step failed"}
    assert only["roofline"]["tokens_per_second"] > 0 and only["roofline_fraction"] is None
    assert "needs a GPU" in only["tiles"]["error"]
    assert entry["best_micro_batch"] is None and entry["projection"] is None


def test_sweep_finds_the_fastest_and_measures_the_rest_there(tmp_path, monkeypatch):
    measured = runner.measure_step

    def measure(passes, options):
        if passes.micro_batch == 4:
            raise MemoryError("does not fit")
        return measured(passes, options)

    monkeypatch.setattr(runner, "measure_step", measure)
    words = ("--config", DENSE, "--sweep", "--parts", "update", "--state", "init", "--trace", str(tmp_path / "t.json"))
    # A trace needs a micro-batch.
    with pytest.raises(bench.ConfigError, match="--trace"):
        run(tmp_path, *words)
    found = run(tmp_path, *words[:-2], code=1)
    (entry,) = found["configurations"]
    assert [each["micro_batch"] for each in entry["runs"]] == [1, 2, 4]
    assert "does not fit" in entry["runs"][2]["step"]["error"]
    assert [each["micro_batch"] for each in entry["runs"] if "update" in each] == [entry["best_micro_batch"]]
    assert entry["model"]["num_tensors_made_nonzero"] == 0


def test_prepared_data_trace_and_evaluation(tmp_path, prepared_site):
    trace = tmp_path / "trace.json"
    words = ("--config", DENSE, "--micro-batch", "8", "--site-config", str(prepared_site), "--trace", str(trace))
    found = run(tmp_path, *words, "--parts", "step,update,breakdown,data,evaluate", "--plot", str(tmp_path / "a.svg"))
    (entry,) = found["configurations"]
    assert entry["runs"][0]["update"]["rows"] == entry["parts"]["data"]["rows"] == "prepared"
    evaluation = entry["parts"]["evaluate"]
    curve, core = evaluation["validation"], evaluation["core"]
    assert curve["tokens_per_second"] * curve["seconds"] == pytest.approx(curve["num_rows"] * CONTEXT)
    assert curve["val_curve_seconds"] == pytest.approx(curve["seconds"] * 16 / curve["num_rows"])
    assert core["bundle"] == "excerpt" and core["padded_tokens"] <= core["bundle_padded_tokens"]
    assert core["bundle_seconds"] * core["tokens_per_second"] == pytest.approx(core["bundle_padded_tokens"])
    assert any("aten::" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])
    ElementTree.parse(tmp_path / "a.svg")


def bench_rank(rank: int, world_size: int, folder: str) -> int:
    """One rank of a launch by torchrun."""
    parts = "step,update,breakdown,communication"
    words = ["--config", DENSE, "--protocol", "test-v1", "--micro-batch", "2", "--steps", "2", "--warmup", "1"]
    return bench.main([*words, "--parts", parts, "--output", f"{folder}/bench.json"])


@pytest.mark.dist
def test_two_ranks_measure_updates_with_their_reduction(tmp_path):
    assert run_ranks(bench_rank, 2, str(tmp_path), with_group=False) == [0, 0]
    record = json.loads((tmp_path / "bench.json").read_text())
    (entry,) = record["configurations"]
    (only,) = entry["runs"]
    assert record["hardware"]["num_devices"] == 2 and record["problems"] == []
    assert only["step"]["tokens"] == 2 * 2 * CONTEXT and only["update"]["tokens"] == ROWS * CONTEXT
    assert only["update"]["num_micro_batches"] == 2
    sent = entry["parts"]["communication"]
    # A ring of two sends all gradients once, and half of the matrices that Muon updates.
    assert sent["sent_bytes_per_rank_and_update"] == sent["gradient_bytes"] + sent["muon_bytes"] // 2
    assert sent["link_bytes_per_second"] == sent["algorithm_bytes_per_second"] > 0
    assert sum(only["breakdown"]["update_shares"].values()) == pytest.approx(1)
    assert sum(only["breakdown"]["reducing_pass_seconds"].values()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batch", "0"], "--micro-batch 0: expected a whole number from 1 to 8."),
        (["--micro-batch", "8,x"], "--micro-batch x: expected a whole number from 1 to 8."),
        ([], "bench: give either --micro-batch, such as 8,16,32, or --sweep."),
        (["--micro-batch", "4", "--sweep"], "bench: give either --micro-batch, such as 8,16,32, or --sweep."),
        (["--micro-batch", "4", "--state", "zero"], "--state zero: expected nonzero or init."),
        (["--micro-batch", "4", "--parts", "stepp"], "--parts: unknown part 'stepp'. Did you mean 'step'?"),
        (["--micro-batch", "4", "--step", "3"], "bench: unknown option --step. Did you mean '--steps'?"),
        (["--micro-batch", "4", "--plot", "a.png"], "--plot a.png: expected a name that ends in .svg or .html."),
        (["--micro-batch", "4", "--output", "no/a.json"], "--output no/a.json: no folder no. Make it first."),
        (
            ["--micro-batch", "4,8", "--trace", "t.json"],
            "--trace: needs one --config, one --micro-batch and the part 'breakdown'.",
        ),
    ],
)
def test_refusals_are_one_line(words, message):
    with pytest.raises(bench.ConfigError) as refusal:
        bench.main(["--config", DENSE, "--protocol", "test-v1", *words])
    assert str(refusal.value).splitlines()[0] == message


def test_numbers_that_are_none_or_endless():
    for text, message in ((",,", "--micro-batch ,,: holds no number"), ("9" * 5000, "expected a whole number from 1")):
        with pytest.raises(bench.ConfigError, match=message) as caught:
            bench.main(["--config", DENSE, "--micro-batch", text])
        assert len(str(caught.value)) < 200


def test_all_problems_of_a_command_line_come_together():
    with pytest.raises(bench.ConfigError) as refusal:
        bench.main(["--protocol", "tset-v1", "--config", "configs/none.json", "--steps", "0", "--micro-batch", "2"])
    lines = str(refusal.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--protocol tset-v1", "configs/none.json", "--steps 0"]
