"""Choices of tiles: read from and put into Triton's autotuners; with the real Triton and fla-core where they are."""

import os
import warnings
from typing import Any

import pytest
import torch

from nexttransformer.errors import ConfigError
from nexttransformer.ops import backends, tuning
from nexttransformer.ops.tuning import Tile, short_key
from tests.ops.triton_stub import Kernels

SUMS = ("fla.ops.demo.sums", (2, "torch.bfloat16", "torch.float32"))
STATES = ("fla.ops.common.states", (2, 16, True, "torch.bfloat16", "torch.float32"))
WIDE = Tile((("BK", 64), ("BV", 64)), 4, 2, 1, None)
CHOICES = {SUMS: Tile((), 4, 3, 1, None), STATES: WIDE}


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    kernels.install(monkeypatch)
    return kernels


def test_kernels_with_a_choice_are_found(kernels):
    assert tuning.find_autotuners() == {"fla.ops.demo.sums": kernels.sums, "fla.ops.common.states": kernels.states}


def test_a_key_holds_arguments_and_distinct_types():
    assert short_key((12, True, None, "torch.float32", "torch.bfloat16", "torch.float32")) == (
        *(12, True, None),
        *("torch.bfloat16", "torch.float32"),
    )
    assert short_key((torch.float32, 1)) == (1, "torch.float32")


def test_measured_once_collected_and_installed(kernels):
    kernels.sums.fastest, kernels.states.fastest = kernels.sums.configs[2], kernels.states.configs[1]
    tuning.install({})
    kernels.exercise()
    # Neither more rows nor a state is another key.
    kernels.exercise(num_rows=3)
    assert kernels.num_measured == 2
    assert tuning.collect() == CHOICES

    kernels.sums.fastest = kernels.sums.configs[0]
    tuning.install(CHOICES, is_final=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.exercise(num_rows=16)
    assert kernels.num_measured == 2
    assert kernels.sums.run(B=1, H=2, x="torch.bfloat16", g="torch.float32") is kernels.sums.configs[2]


def test_only_what_is_used_is_collected(kernels):
    other = ("fla.ops.demo.sums", (7, "torch.float32"))
    tuning.install({**CHOICES, other: CHOICES[SUMS]})
    assert tuning.collect() == {}
    kernels.exercise()
    assert tuning.collect() == CHOICES and kernels.num_measured == 0


def test_a_choice_after_the_start_is_a_warning(kernels):
    tuning.install(CHOICES, is_final=True)
    with pytest.warns(RuntimeWarning, match=r"fla.ops.demo.sums: this process chose tiles alone.*\[5, 'torch"):
        kernels.sums.run(B=1, H=5, x="torch.bfloat16")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({STATES: WIDE._replace(num_warps=8)}, "fla.ops.common.states: the tile for .* none of its 2 candidates"),
        ({STATES: WIDE._replace(kwargs=(("BK", 64),))}, "none of its 2 candidates"),
        ({("fla.ops.demo.only", (2,)): Tile((("BV", 16),), 4, 3, 1, None)}, "no kernel of this fla-core"),
        ({("os.system", (2,)): WIDE}, "os.system: no kernel of this fla-core"),
    ],
)
def test_what_is_no_candidate_is_refused(kernels, wrong, message):
    tuning.install({SUMS: CHOICES[SUMS]})
    cache = kernels.sums.cache
    with pytest.raises(ConfigError, match=message) as refusal:
        tuning.install({**CHOICES, **wrong})
    assert "\n" not in str(refusal.value) and kernels.sums.cache is cache
    assert len(tuning.refused({**CHOICES, **wrong})) == 1 and tuning.refused(CHOICES) == []


# From here on with the real libraries; kernels cannot run without a GPU, but their autotuners decide as they do there.

# Kernels that the wrappers in `ops/` run; fox's attention itself has no choice of tiles.
TUNED_MODULES = {
    "fla.ops.gated_delta_rule.chunk": {
        "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
        "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "fla.ops.common.chunk_o.chunk_bwd_kernel_dqkwg",
        "fla.ops.common.chunk_o.chunk_bwd_kernel_dv_local",
        "fla.ops.common.chunk_o.chunk_fwd_kernel_o",
        "fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel",
        "fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel",
        "fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd_kernel",
        "fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel",
    },
    "fla.ops.kda.chunk_bwd": {
        "fla.ops.gla.chunk.chunk_gla_fwd_kernel_o",
        "fla.ops.kda.chunk_bwd.chunk_kda_bwd_kernel_dAv",
        "fla.ops.kda.chunk_bwd.chunk_kda_bwd_kernel_wy_dqkg_fused",
        "fla.ops.kda.chunk_intra.chunk_kda_bwd_kernel_intra",
        "fla.ops.kda.chunk_intra.chunk_kda_fwd_kernel_inter_solve_fused",
        "fla.ops.kda.wy_fast.recompute_w_u_fwd_kda_kernel",
        "fla.ops.utils.cumsum.chunk_local_cumsum_vector_kernel",
    },
    "fla.ops.attn.parallel": {"fla.ops.utils.cumsum.chunk_global_cumsum_scalar_kernel"},
}
LOCAL_SUM = "fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel"


@pytest.fixture(scope="module")
def real():
    """Real autotuners by kernel name, all of them restored afterwards."""
    os.environ.setdefault(backends.DISPATCH_VARIABLE, "1")
    pytest.importorskip("triton", reason="Triton is not installed (CPU environment)")
    pytest.importorskip("fla", reason="fla-core is not installed (CPU environment)")
    tuning.load_kernels()
    found = tuning.find_autotuners()
    before = {kernel: (autotuner.cache, autotuner.keys) for kernel, autotuner in found.items()}
    yield found
    for kernel, (cache, keys) in before.items():
        found[kernel].cache, found[kernel].keys = cache, keys


@pytest.mark.parametrize("module", sorted(TUNED_MODULES))
def test_real_kernels_of_our_operations_are_known(real, module):
    loaded = dict(real)
    __import__(module)
    assert tuning.find_autotuners() == loaded, "a module that is loaded late would be tuned unseen"
    assert set(loaded) >= TUNED_MODULES[module]
    functions = [autotuner.base_fn for autotuner in loaded.values()]
    assert len({id(function) for function in functions}) == len(loaded)


def test_real_configurations_go_out_and_in(real):
    choices: tuning.Choices = {
        (kernel, (1, "torch.bfloat16")): tuning.tile_of(each.configs[-1]) for kernel, each in real.items()
    }
    tuning.install(choices)
    assert tuning.refused(choices) == []
    for autotuner in real.values():
        # As Triton asks: a call whose key it has not met, with the types of two tensors.
        assert (1, "torch.bfloat16", "torch.bfloat16") in autotuner.cache
        assert autotuner.cache[1, "torch.bfloat16", "torch.bfloat16"] is autotuner.configs[-1]
    assert tuning.collect() == choices


class Recorder:
    """In the place of a compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def run(self, *arguments: Any, **named: Any) -> None:
        self.calls.append(named)


def run_local_sum(num_rows: int) -> None:
    """Calls the real kernel as `chunk_local_cumsum_scalar` does, through fla-core's decorators."""
    from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel

    g, out = torch.zeros(num_rows, 128, 2), torch.zeros(num_rows, 128, 2)
    sizes = {"T": 128, "B": num_rows, "H": 2, "BT": 64, "REVERSE": False}
    kernel: Any = chunk_local_cumsum_scalar_kernel
    kernel.run(s=g, o=out, scale=None, cu_seqlens=None, chunk_indices=None, **sizes, grid=(2, num_rows), warmup=False)


@pytest.fixture
def local_sum(real, monkeypatch):
    """The real autotuner of a kernel whose key has rows, and what it would launch."""
    autotuner, recorder = real[LOCAL_SUM], Recorder()
    monkeypatch.setattr(autotuner, "fn", recorder)
    # The cache on disk asks the driver.
    monkeypatch.setattr(autotuner, "cache_results", False)
    return autotuner, recorder


def test_real_autotuner_measures_once_for_any_rows(local_sum, monkeypatch):
    autotuner, recorder = local_sum
    measured = []

    def bench(*arguments: Any, config: Any, **named: Any) -> float:
        measured.append(config)
        return abs(config.num_warps - 2)

    monkeypatch.setattr(autotuner, "_bench", bench)
    tuning.install({})
    run_local_sum(1)
    run_local_sum(16)
    assert len(measured) == len(autotuner.configs) == 4
    assert [call["num_warps"] for call in recorder.calls] == [2, 2]
    key = (2, 64, False, False, "torch.float32")
    assert tuning.collect() == {(LOCAL_SUM, key): Tile((), 2, 3, 1, None)}


def test_real_autotuner_runs_what_is_stored(local_sum, monkeypatch):
    autotuner, recorder = local_sum
    monkeypatch.setattr(autotuner, "_bench", lambda *arguments, **named: pytest.fail("measured"))
    for config in autotuner.configs:
        tuning.install({(LOCAL_SUM, (2, 64, False, False, "torch.float32")): tuning.tile_of(config)}, is_final=True)
        run_local_sum(5)
        assert recorder.calls[-1]["num_warps"] == config.num_warps
        assert recorder.calls[-1]["B"] == 5
