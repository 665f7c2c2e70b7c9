"""Kernel tuning with fla-core on a GPU: measured at the first launch, put back at the second, at any number of rows."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.ops import backends, fla_core, self_check
from nexttransformer.ops.path_check import exercise_path
from nexttransformer.training import kernel_tuning
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.kernel_tuning import KernelTuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def clean_slate():
    backends.forget_choices()
    yield
    fla_core.set_guard_bypassed(False)
    backends.forget_choices()


@pytest.mark.parametrize("method", ["gdn", "kda", "fox"])
def test_the_second_launch_measures_nothing(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner", reason="Triton is not installed")
    if backends.missing_package(backends.versions()) is not None:
        pytest.skip("fla-core is not installed")
    monkeypatch.setattr(kernel_tuning, "PACKAGE_FOLDER", tmp_path / "package")
    config = resolve_method(method_files()[method], "proxy-v1")

    def launch() -> tuple[dict[str, Any], KernelTuning]:
        tuner = KernelTuning(SingleProcess(), DEVICE, cache_root=tmp_path)
        verdict = self_check.check_kernels(config, mode="open", device=DEVICE, tuner=tuner)
        return verdict, tuner

    first, tuner = launch()
    assert first["passed"] and first["tuning"]["source"] == "measured" and tuner.notes == [], tuner.notes

    def measured(self: Any, *arguments: Any, **named: Any) -> Any:
        pytest.fail(f"{self.base_fn.__name__} was measured again")

    monkeypatch.setattr(autotuner.Autotuner, "_bench", measured)
    monkeypatch.setattr(autotuner.Autotuner, "check_disk_cache", measured)
    second, tuner = launch()
    assert second["passed"] and tuner.notes == [], tuner.notes
    assert second["tuning"] == {"digest": first["tuning"]["digest"], "source": "site"}
    # What training does later, at another number of rows and without a state, is decided too.
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for op, sizes in self_check.fused_ops(config):
            if backends.chosen_path(self_check.describe(op, sizes)) == "fla":
                exercise_path(op, "fla", sizes, device=DEVICE)
