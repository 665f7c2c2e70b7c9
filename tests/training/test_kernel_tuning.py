"""Where kernel tiles come from, what is stored where, and that all ranks get rank 0's; kernels are stand-ins."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.errors import CheckpointError, ConfigError
from nexttransformer.ops import backends, self_check
from nexttransformer.training import kernel_tuning, session
from nexttransformer.training.collectives import GroupCollectives, SingleProcess
from nexttransformer.training.distributed import Limits, connect
from nexttransformer.training.kernel_tuning import KernelTuning
from nexttransformer.training.options import parse_options
from nexttransformer.training.run_folder import RunFolder
from nexttransformer.training.tuning_document import TuningDocument, file_name
from tests.distributed import run_ranks
from tests.ops.triton_stub import Kernels
from tests.training.trainer_runs import arguments

CPU = torch.device("cpu")
VERSIONS = backends.Versions("2.12.1", "13.0", "580.1", "3.7.1", "0.6.0")
SITE_NAME = "cpu-triton-3.7.1-fla-0.6.0.json"
# Written by hand: what the stand-in's kernels give when the first candidate of each is the fastest.
DOCUMENT = {
    "schema": "nexttransformer.kernel_tuning/1",
    "gpu": "cpu",
    "triton": "3.7.1",
    "fla_core": "0.6.0",
    "kernels": {
        "fla.ops.common.states": [
            {
                "key": [2, 16, True, "torch.bfloat16", "torch.float32"],
                "kwargs": {"BK": 64, "BV": 32},
                "num_warps": 4,
                "num_stages": 2,
                "num_ctas": 1,
                "maxnreg": None,
            }
        ],
        "fla.ops.demo.sums": [
            {
                "key": [2, "torch.bfloat16", "torch.float32"],
                "kwargs": {},
                "num_warps": 1,
                "num_stages": 3,
                "num_ctas": 1,
                "maxnreg": None,
            }
        ],
    },
}
# sha256sum of the same value as `python -c json.dumps(..., sort_keys=True, separators=(",", ":"))` prints it.
DIGEST = "e91cbb22ecbb869e90f134da4ed1d9cc0d756861d41c4366359904650b02adef"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The folder of the site's documents; the package ships none."""
    monkeypatch.setattr(kernel_tuning, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr(backends, "versions", lambda: VERSIONS)
    return tmp_path / "cache/tuning"


@pytest.fixture
def launch(site, tmp_path, monkeypatch):
    """Returns a function that tunes as a launch does, in new kernels, and returns (tuning, verdict, kernels)."""

    def start(exercise: Any = None, fastest: int = 0) -> tuple[KernelTuning, Any, Kernels]:
        kernels = Kernels()
        kernels.install(monkeypatch)
        kernels.sums.fastest = kernels.sums.configs[fastest]
        files = [tmp_path / "kernel_tuning.json", tmp_path / "moved/kernel_tuning.json"]
        tuning = KernelTuning(SingleProcess(), CPU, cache_root=site.parent, run_files=files)
        tuning.complete(exercise or kernels.exercise)
        return tuning, tuning.finish(), kernels

    return start


def write(path: Path, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**DOCUMENT, **changes}))


def states_of(num_warps: int = 4, width: int = 32) -> dict[str, Any]:
    (entry,) = DOCUMENT["kernels"]["fla.ops.common.states"]
    return {**entry, "num_warps": num_warps, "kwargs": {"BK": 64, "BV": width}}


def test_measured_once_for_site_and_run(launch, site, tmp_path):
    tuning, verdict, kernels = launch()
    assert verdict == {"digest": DIGEST, "source": "measured"} and kernels.num_measured == 2 and tuning.notes == []
    assert json.loads((site / SITE_NAME).read_text()) == DOCUMENT
    run_file = tmp_path / "kernel_tuning.json"
    tuning.save(run_file)
    assert json.loads(run_file.read_text()) == DOCUMENT

    # The next attempt takes the run's, whatever would win now.
    (site / SITE_NAME).unlink()
    tuning, verdict, kernels = launch(fastest=2)
    assert verdict == {"digest": DIGEST, "source": "run"} and kernels.num_measured == 0
    assert not (site / SITE_NAME).exists()
    before = run_file.stat().st_mtime_ns
    tuning.save(run_file)
    assert run_file.stat().st_mtime_ns == before


def test_order_of_places(launch, site, tmp_path):
    write(tmp_path / "package" / SITE_NAME)
    assert launch(fastest=2)[1] == {"digest": DIGEST, "source": "package"}
    assert not site.exists()
    write(site / SITE_NAME, kernels={"fla.ops.common.states": [states_of(width=64)]})
    # What the site lacks is taken from the package, and the weaker source is named.
    _, verdict, kernels = launch()
    assert verdict["source"] == "package" and verdict["digest"] != DIGEST and kernels.num_measured == 0
    write(tmp_path / "moved/kernel_tuning.json")
    assert launch(fastest=2)[1] == {"digest": DIGEST, "source": "run"}


def test_missing_choices_are_measured_and_added_to_the_site(launch, site):
    other = {**states_of(), "key": [4, 64, True, "torch.bfloat16", "torch.float32"]}
    write(site / SITE_NAME, kernels={"fla.ops.common.states": [states_of(), other]})
    tuning, verdict, kernels = launch()
    # The digest covers what runs, not what else the site knows.
    assert verdict == {"digest": DIGEST, "source": "measured"} and kernels.num_measured == 1
    stored = json.loads((site / SITE_NAME).read_text())["kernels"]
    assert stored == {**DOCUMENT["kernels"], "fla.ops.common.states": [states_of(), other]}


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA\nH100"}, {"triton": "3.6.0"}, {"fla_core": "0.6.1"}])
def test_another_machines_tiles_are_left_alone(launch, tmp_path, change):
    run_file = tmp_path / "kernel_tuning.json"
    write(run_file, **change)
    tuning, verdict, kernels = launch()
    assert verdict == {"digest": DIGEST, "source": "measured"} and kernels.num_measured == 2
    (note,) = tuning.notes
    assert str(run_file) in note and "not used here (cpu, 3.7.1, 0.6.0)" in note and "\n" not in note
    tuning.save(run_file)
    assert json.loads(run_file.read_text()) == DOCUMENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (json.dumps({**DOCUMENT, "schema": "nexttransformer.kernel_tuning/2"}).encode(), "schema: expected"),
        (json.dumps({**DOCUMENT, "gpus": 1}).encode(), "unknown key 'gpus'"),
        (
            json.dumps({**DOCUMENT, "kernels": {"fla.ops.common.states": [states_of()] * 2}}).encode(),
            "not in the order of their keys",
        ),
        (
            json.dumps({**DOCUMENT, "kernels": {"fla.ops.common.states": [states_of(num_warps=8)]}}).encode(),
            "fla.ops.common.states: the tile for .* is none of its 2 candidates",
        ),
        (json.dumps({**DOCUMENT, "kernels": {"fla.ops.none": [states_of()]}}).encode(), "fla.ops.none: no kernel"),
        (json.dumps({**DOCUMENT, "kernels": {"a\nb": [states_of()]}}).encode(), "a b: no kernel"),
        (json.dumps({**DOCUMENT, "kernels": {"a" * 100_000: [states_of()]}}).encode(), "aaa[.]{3} (Delete|Restore)"),
    ],
)
@pytest.mark.parametrize(
    ("place", "advice"),
    [
        ("kernel_tuning.json", "Restore the file, or start a new run."),
        (f"cache/tuning/{SITE_NAME}", "Delete the file to tune again."),
    ],
)
def test_a_damaged_document_is_one_line(launch, tmp_path, content, message, place, advice):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        launch()
    text = str(refusal.value)
    assert text.startswith(str(tmp_path / place)) and text.endswith(advice)
    assert "\n" not in text and len(text) < 1000


def test_a_folder_that_cannot_be_looked_into_is_one_line(launch, monkeypatch):
    """Raised on rank 0 alone: as anything but our own error, the other ranks would wait for it."""

    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ConfigError, match="kernel_tuning.json: cannot be used: Permission denied"):
        launch()


def test_a_site_that_cannot_be_written_is_a_note(launch, site):
    site.parent.mkdir()
    site.write_text("a file in the place of the folder")
    tuning, verdict, _ = launch()
    assert verdict == {"digest": DIGEST, "source": "measured"}
    (note,) = tuning.notes
    assert str(site) in note and "could not be stored" in note


def test_a_run_folder_that_cannot_be_written_is_refused(launch, tmp_path):
    tuning, _, _ = launch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        tuning.save(tmp_path / "none/kernel_tuning.json")


def test_a_kernel_that_fails_is_left_to_its_check(launch, site, tmp_path):
    def fail() -> None:
        raise RuntimeError("out of memory\nmore")

    tuning, verdict, _ = launch(fail)
    assert verdict is None and tuning.notes == ["kernel tuning: RuntimeError: out of memory"]
    tuning.save(tmp_path / "kernel_tuning.json")
    assert not (tmp_path / "kernel_tuning.json").exists() and not site.exists()


def test_nothing_to_tune_reads_nothing(site, tmp_path):
    (tmp_path / "kernel_tuning.json").write_text("{")
    tuning = KernelTuning(SingleProcess(), CPU, cache_root=site.parent, run_files=[tmp_path / "kernel_tuning.json"])
    assert tuning.finish() is None


def test_an_evaluation_takes_the_runs_tiles_and_measures_only_the_rest(site, tmp_path, monkeypatch):
    write(tmp_path / "run/kernel_tuning.json", kernels={"fla.ops.common.states": [states_of(width=64)]})
    monkeypatch.setattr(kernel_tuning, "device_name", lambda _: "cpu")
    # A CPU installation has no einops.
    monkeypatch.setattr(backends, "missing_package", lambda _: None)
    kernels, said = Kernels(), []
    kernels.install(monkeypatch)
    config = resolve_method(method_files()["gdn_hybrid"], "test-v1")
    place = {"control": SingleProcess(), "cache_root": site.parent, "say": said.append}
    # From within the checkpoint's folder, as with `--checkpoint .`.
    (tmp_path / "run/checkpoint_00000001").mkdir()
    monkeypatch.chdir(tmp_path / "run/checkpoint_00000001")
    kernel_tuning.restore_tiles(config, Path(), device=torch.device("cuda", 0), **place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.exercise()
    # The first candidate would have won; the run has the second.
    assert kernels.states.run(H=2, K=16, USE_G=True, x="torch.bfloat16", g="torch.float32").kwargs["BV"] == 64
    assert (kernels.states.num_measured, kernels.sums.num_measured) == (0, 1)
    assert said == [] and not site.exists()


@pytest.mark.parametrize(("method", "device"), [("gdn_hybrid", "cpu"), ("dense_full", "cuda")])
def test_an_evaluation_without_such_kernels_looks_for_no_tiles(method, device, tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "missing_package", lambda _: None)
    monkeypatch.setattr(kernel_tuning.KernelTuning, "restore", lambda self: pytest.fail("looked for tiles"))
    config = resolve_method(method_files()[method], "test-v1")
    place = {"control": SingleProcess(), "device": torch.device(device), "cache_root": tmp_path}
    kernel_tuning.restore_tiles(config, tmp_path, **place)


def test_file_names():
    assert file_name(("NVIDIA H100 80GB HBM3", "3.7.1+git/a", "0.6.0")) == (
        "NVIDIA_H100_80GB_HBM3-triton-3.7.1_git_a-fla-0.6.0.json"
    )
    assert file_name(("../../x", "..", "0.6.0")) == "x-triton--fla-0.6.0.json"


def test_the_package_holds_readable_documents():
    for path in kernel_tuning.PACKAGE_FOLDER.glob("*.json"):
        assert file_name(TuningDocument.read_choices(path).machine) == path.name
    assert (kernel_tuning.PACKAGE_FOLDER / "README.md").is_file()


def test_every_attempt_of_a_run_has_the_same_tiles(prepared_site, tmp_path, monkeypatch):
    """The real start of a run; only the self-check is told that there is something to tune on this CPU."""
    kernels = Kernels()
    kernels.install(monkeypatch)
    monkeypatch.setattr(kernel_tuning, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr(backends, "versions", lambda: VERSIONS)
    site = json.loads(prepared_site.read_text()) | {"data_root": str(prepared_site.parent / "data")}
    (tmp_path / "site.json").write_text(json.dumps({**site, "cache_root": "cache"}))

    def check_kernels(*arguments: Any, tuner: KernelTuning, **named: Any) -> dict[str, Any]:
        tuner.complete(kernels.exercise)
        return {**self_check.check_kernels(*arguments, **named), "tuning": tuner.finish()}

    monkeypatch.setattr(session, "check_kernels", check_kernels)

    def launch(output: Path, *more: str) -> None:
        options = parse_options(arguments(tmp_path / "site.json", output, *more))
        opened = session.open_session(options, connect(options.place, Limits(), output / "logs"))
        assert isinstance(opened, session.Session)
        opened.close()

    run, moved = tmp_path / "run", tmp_path / "moved"
    launch(run)
    # What would win by now, and what the site has by now, do not matter any more.
    kernels.sums.fastest = kernels.sums.configs[2]
    write(tmp_path / f"cache/tuning/{SITE_NAME}", kernels={"fla.ops.common.states": [states_of(width=64)]})
    launch(run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    verdicts = [event["meta"]["kernels"]["tuning"] for event in events if event["key"] == "attempt_start"]
    assert verdicts == [{"digest": DIGEST, "source": source} for source in ("measured", "run")]
    assert json.loads((run / "kernel_tuning.json").read_text()) == DOCUMENT

    (moved / "checkpoint_00000001").mkdir(parents=True)
    (run / "kernel_tuning.json").rename(moved / "kernel_tuning.json")
    tuning = session._kernel_tuning(
        parse_options(arguments(tmp_path / "site.json", run, "--resume", str(moved / "checkpoint_00000001"))),
        connect(parse_options(arguments(tmp_path / "site.json", run)).place, Limits(), run / "logs"),
        RunFolder(run),
    )
    tuning.complete(kernels.exercise)
    assert tuning.finish() == {"digest": DIGEST, "source": "run"}


def tune_on_ranks(rank: int, world_size: int, folder: Path) -> Any:
    """Each rank would choose tiles of its own; returns what it got."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = Kernels()
        kernels.install(patch)
        patch.setattr(kernel_tuning, "PACKAGE_FOLDER", folder / "package")
        found = VERSIONS if rank == 0 else replace(VERSIONS, driver="other")
        patch.setattr(backends, "versions", lambda: found)
        kernels.sums.fastest = kernels.sums.configs[rank]
        tuning = KernelTuning(GroupCollectives(), CPU, cache_root=folder / f"cache_{rank}")
        try:
            tuning.complete(kernels.exercise)
            tuning.complete(kernels.exercise)
        except ConfigError as error:
            return str(error)
        verdict = tuning.finish()
        measured = kernels.num_measured
        kernels.exercise()
        warps = kernels.sums.run(B=1, H=2, x="torch.bfloat16", g="torch.float32").num_warps
        return verdict, measured, kernels.num_measured, warps


@pytest.mark.dist
def test_all_ranks_run_rank_0s_tiles(tmp_path):
    first, second = run_ranks(tune_on_ranks, 2, tmp_path)
    assert first == ({"digest": DIGEST, "source": "measured"}, 2, 2, 1)
    assert second == ({"digest": DIGEST, "source": "measured"}, 0, 0, 1)
    assert (tmp_path / f"cache_0/tuning/{SITE_NAME}").exists() and not (tmp_path / "cache_1").exists()
    # A damaged document on rank 0's node ends every rank in the same line.
    (tmp_path / f"cache_0/tuning/{SITE_NAME}").write_text("{")
    first, second = run_ranks(tune_on_ranks, 2, tmp_path)
    assert first == second and "not valid JSON" in first


def restore_on_ranks(rank: int, world_size: int, folder: Path) -> Any:
    """Only rank 0's cache has a document; returns what was measured and the width that the kernel runs with."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = Kernels()
        kernels.install(patch)
        patch.setattr(kernel_tuning, "PACKAGE_FOLDER", folder / "package")
        patch.setattr(kernel_tuning, "device_name", lambda _: "cpu")
        patch.setattr(backends, "versions", lambda: VERSIONS)
        patch.setattr(backends, "missing_package", lambda _: None)
        config = resolve_method(method_files()["gdn_hybrid"], "test-v1")
        place = {"control": GroupCollectives(), "device": torch.device("cuda", rank)}
        try:
            kernel_tuning.restore_tiles(config, folder / "run/checkpoint", cache_root=folder / f"cache_{rank}", **place)
        except ConfigError as error:
            return str(error)
        chosen = kernels.states.run(H=2, K=16, USE_G=True, x="torch.bfloat16", g="torch.float32")
        return kernels.num_measured, chosen.kwargs["BV"]


@pytest.mark.dist
def test_an_evaluation_gives_all_ranks_rank_0s_tiles(tmp_path):
    document = tmp_path / f"cache_0/tuning/{SITE_NAME}"
    write(document, kernels={"fla.ops.common.states": [states_of(width=64)]})
    assert run_ranks(restore_on_ranks, 2, tmp_path) == [(0, 64), (0, 64)]
    document.write_text("{")
    first, second = run_ranks(restore_on_ranks, 2, tmp_path)
    assert first == second and "not valid JSON" in first
