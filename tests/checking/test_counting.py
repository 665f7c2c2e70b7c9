"""The counted forward pass against hand-computed multiply-adds and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nexttransformer.checking.counting import count_forward
from nexttransformer.checking.tiny import build_randomized, random_ids, tiny_copy
from nexttransformer.config import method_files, resolve_method


def tiny(method: str):
    return build_randomized(tiny_copy(resolve_method(method_files()[method], "formal-v1"), has_windows=False))


def test_dense_by_hand():
    model = tiny("dense_full")
    counts = count_forward(model)
    expected = {
        "lm_head.weight": 512 * 64,
        "smear_gate.weight": 24,
        "transformer.wte.weight": 0,
        "value_embeds.3.weight": 0,
        "transformer.h.1.attn.ve_gate.weight": 2 * 12,
        "transformer.h.0.attn.c_q.weight": 64 * 64,
        "transformer.h.2.attn.c_v.weight": 64 * 64,
        "transformer.h.2.attn.c_proj.weight": 64 * 64,
        "transformer.h.0.mlp.c_fc.weight": 64 * 128,
        "transformer.h.3.mlp.c_proj.weight": 64 * 128,
        "resid_lambdas": 0,
    }
    assert {name: counts.products[name] for name in expected} == pytest.approx(expected)
    # Four layers of the whole square: 128 keys, twice 64 channels.
    assert counts.mixing == pytest.approx(4 * 128 * 2 * 64)


def test_shared_split_joined_and_elementwise_weights():
    # One weight for four streams; one weight split over four streams; taps of a convolution written as products.
    hc, lite, gdn = (count_forward(tiny(method)) for method in ("hc", "mhc_lite", "gdn"))
    assert hc.products["residual.sublayers.3.generator.weight"] == pytest.approx(4 * 6 * 64)
    assert lite.products["residual.sublayers.3.generator.weight"] == pytest.approx(32 * 4 * 64)
    assert gdn.products["transformer.h.0.attn.c_beta.weight"] == pytest.approx(2 * 64)
    assert gdn.products["transformer.h.0.attn.q_conv.weight"] == 0
    assert gdn.elementwise["transformer.h.0.attn.q_conv.weight"] == pytest.approx(64 * 4)


@pytest.mark.parametrize("method", ["fox", "kda", "mudd", "simple_hc", "attnres_block"])
def test_total_equals_the_flop_counter_of_torch(method):
    """Everything is charged once: weights and mixing add up to what torch counts in products."""
    model = tiny(method)
    ids_BT = random_ids(model.config, rows=2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids_BT)
    expected = counter.get_total_flops() / 2 / ids_BT.numel()
    counts = count_forward(model)
    num_attention = sum(layer["type"] == "attention" and not layer["forget"] for layer in model.config.layers)
    # torch does not count attention on a CPU.
    found = sum(counts.products.values()) + counts.mixing - num_attention * 128 * 2 * 64
    assert found == pytest.approx(expected)
