"""Pure parts of the benchmark against numbers worked out by hand, and kernel names as an H200 reports them."""

import json
from types import SimpleNamespace

import pytest
import torch

from nexttransformer.benchmark.breakdown import exclusive_seconds, read_trace
from nexttransformer.benchmark.evaluation import StandInTokenizer
from nexttransformer.benchmark.kernel_classes import classify
from nexttransformer.benchmark.projection import project
from nexttransformer.benchmark.rows import SyntheticRows
from nexttransformer.benchmark.runner import sweep_sizes
from nexttransformer.benchmark.subject import fill_nonzero
from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.ops.relu_squared.tiles import BACKWARD_TILES, FORWARD_TILES, Tile, chosen_tile
from nexttransformer.protocol import FORMAL_V1, TEST_V1


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], {}),
        ([("gemm", 0, 2), ("gemm", 5, 6)], {"products": 3, "idle": 3}),
        # Overlapping computation counts once, for the first.
        ([("gemm", 0, 4), ("flash", 2, 5)], {"products": 4, "attention": 1, "idle": 0}),
        # Communication counts where nothing is computed: 4..5 of the first, 6..9 of the second.
        (
            [("gemm", 0, 4), ("nccl_a", 1, 5), ("gemm", 5, 6), ("nccl_b", 5.5, 9)],
            {"products": 5, "communication": 4, "idle": 0},
        ),
        # Two communications at once are one; computation inside one splits it.
        (
            [("nccl_a", 0, 10), ("nccl_b", 1, 9), ("gemm", 3, 4), ("gemm", 12, 13)],
            {"communication": 9, "products": 2, "idle": 2},
        ),
    ],
)
def test_every_instant_has_one_class(kernels, expected):
    found = exclusive_seconds(kernels)
    assert found == pytest.approx(expected)


def test_a_gpu_trace_is_kernels_and_copies(tmp_path):
    range_ = {"ph": "X", "cat": "gpu_user_annotation", "name": "DistributedDataParallel.forward", "ts": 0, "dur": 99}
    events = [
        range_,
        {**range_, "cat": "cpu_op", "name": "aten::mm"},
        {"ph": "X", "cat": "kernel", "name": "nvjet_tst_128x256", "ts": 1000.5, "dur": 2.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1004.5, "dur": 1.5},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = exclusive_seconds(read_trace(path))
    assert found == pytest.approx({"products": 2e-6, "copies": 1.5e-6, "idle": 2e-6})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x5_nn_align8>(Params)", "products"),
        ("_product_kernel", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x128x128", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 16, 128>", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128, 16, 128>", "attention"),
        ("triton_tem_fused_flex_attention_backward_3", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_5", "elementwise"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "recurrent"),
        ("prepare_wy_repr_bwd_kernel", "recurrent"),
        ("merge_16x16_to_64x64_inverse_kernel", "recurrent"),
        ("parallel_forgetting_attn_fwd_kernel", "attention"),
        ("_softcap_kernel", "loss"),
        ("triton_red_fused__to_copy_embedding_mean_mul_pow_rsqrt_0", "embeddings"),
        ("triton_poi_fused_embedding_dense_backward_41", "embeddings"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900>", "embeddings"),
        ("triton_red_fused__fused_rms_norm_add_mul_7", "elementwise"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "gradient_accumulation",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("stream_forward_kernel", "elementwise"),
        ("stream_backward_kernel", "elementwise"),
        ("stream_mixing_backward_kernel", "elementwise"),
        ("_convolved_forward_kernel", "elementwise"),
        ("_lookup_gradient_kernel", "embeddings"),
        ("void at::native::(anonymous namespace)::searchsorted_cuda_kernel<int, int>", "embeddings"),
        ("recompute_w_u_fwd_kernel", "recurrent"),
        ("_specialized_product_kernel", "products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("aten::mm", "products"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("torch::autograd::AccumulateGrad", "gradient_accumulation"),
        ("aten::mul", "elementwise"),
        ("something_new", "other"),
    ],
)
def test_kernel_classes(name, kind):
    assert classify(name) == kind


def test_projection_by_hand():
    run = {"micro_batch": 16, "step": {"seconds": {"median_seconds": 0.3}}}
    run["update"] = {"seconds": {"median_seconds": 9.66}, "num_micro_batches": 32}
    parts = {
        "optimizer": {"seconds": {"median_seconds": 0.05}},
        "checkpoint": {"save_seconds": 36.0},
        "evaluate": {
            "validation": {"val_curve_seconds": 80.0},
            "core": {"bundle": "full", "bundle_seconds": 360.0},
        },
    }
    found = project(run, parts, FORMAL_V1, world_size=1, num_gpus=8)
    assert found is not None
    # 512 rows: 64 a device, 4 passes of 0.3 s; 0.06 s beside them; 46,875 updates; 75 saves, 76 curves, 15 CORE.
    assert found["num_micro_batches"] == 4 and found["beside_passes_from"] == "update"
    assert found["update_seconds"] == pytest.approx(1.26)
    assert found["tokens_per_second"] == pytest.approx(2**20 / 1.26)
    assert found["hours"] == pytest.approx(
        {"passes": 15.625, "beside_passes": 0.78125, "saves": 0.75, "validation": 76 / 360, "core": 0.1875}
    )
    # A difference below the optimizer's own time is noise.
    run["update"]["seconds"]["median_seconds"] = 9.5
    again = project(run, parts, FORMAL_V1, world_size=1, num_gpus=8)
    assert again is not None and again["beside_passes_from"] == "optimizer"
    assert again["update_seconds"] == pytest.approx(1.25)
    assert project({"micro_batch": 16, "step": {"error": "x"}}, {}, FORMAL_V1, world_size=1, num_gpus=8) is None


@pytest.mark.parametrize("method", ["dense_full", "gdn", "mhc_lite"])
def test_nonzero_state_is_chosen_by_declarations(method):
    config = resolve_method(method_files()[method], TEST_V1)
    model = build_model(config, seed=1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    names = fill_nonzero(model, seed=2)
    blocks = [f"transformer.h.{layer}.{part}.c_proj.weight" for layer in range(4) for part in ("attn", "mlp")]
    assert sorted(names) == sorted([*blocks, "lm_head.weight"])
    for name, parameter in model.named_parameters():
        if name in names:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
        else:
            assert torch.equal(parameter, before[name])
    again = build_model(config, seed=1)
    fill_nonzero(again, seed=2)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_sweep_sizes_double_up_to_the_share():
    assert list(sweep_sizes(8)) == [1, 2, 4, 8]
    assert list(sweep_sizes(1)) == [1]
    assert list(sweep_sizes(171)) == [4, 8, 16, 32, 64, 128, 171]


def test_synthetic_rows_are_whole_rows_of_known_ids():
    rows = SyntheticRows(TEST_V1, num_rows=16)
    found = rows.rows(3, 2, 5)
    assert found.shape == (3, 129) and found.dtype == "uint16" and found.max() < 512
    assert (found[0] == rows.read([5])[0]).all() and (found[0] != found[1]).any()


def test_stand_in_tokens_are_about_as_many_as_real_ones():
    text = "The quick brown fox jumps over the lazy dog, again and again. " * 20
    ids = StandInTokenizer(32_768).encode(text)
    assert 3.5 < len(text) / len(ids) < 5 and max(ids) < 32_767


@pytest.mark.parametrize(
    ("major", "backward"), [(9, Tile(128, 256, 64, 16, 12, 3, is_specialized=True)), (10, Tile(128, 256, 64, 4, 8, 3))]
)
def test_the_tiles_in_use_are_fixed(major, backward, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    device = torch.device("cuda", 0)
    assert chosen_tile(device, is_backward=False) == Tile(128, 256, 64, 8, 8, 3)
    assert chosen_tile(device, is_backward=True) == backward
    for tiles in (FORWARD_TILES, BACKWARD_TILES):
        assert len(set(tiles)) == len(tiles)
        # Shared memory of a Hopper block: the loads under way, and half of the result or all of it.
        for tile in tiles:
            loads = tile.num_stages * (tile.rows + tile.columns) * tile.depth * 2
            result = tile.rows * tile.columns * 2 // (1 if tile.is_specialized else 2)
            assert loads + result <= 227 * 1024
