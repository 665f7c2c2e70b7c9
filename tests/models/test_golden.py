"""Golden values of the base model: two independent programs agreed on every number below."""

import math

import pytest
import torch

from nexttransformer.models import build_model
from nexttransformer.models.layers import rope_table
from nexttransformer.ops.rotary_heads.naive import rotate
from tests.models.tiny import closed_form, fill_closed_form, golden_model, golden_tokens, tiny_config

WINDOWS = {"A": [128, 128, 128, None], "B": [None] * 4, "C": [128, 128, None]}
LOGITS = {
    (0, 0, 0): (1.327671, 1.327671, 1.408306),
    (0, 0, 511): (-0.529148, -0.529148, -0.585137),
    (0, 1, 1): (-0.671889, -0.671889, 0.092766),
    (1, 1, 7): (0.956242, 0.956242, 1.241342),
    (1, 127, 40): (-0.590523, -0.590523, -0.375377),
    (0, 128, 100): (0.420563, 0.420563, 0.616132),
    (0, 129, 100): (-0.219477, -0.213897, 0.308501),
    (1, 129, 300): (0.302657, 0.292669, 0.214541),
    (1, 200, 256): (1.268881, 1.259440, 1.271144),
    (0, 255, 0): (-0.206632, -0.290625, -0.032583),
    (0, 255, 511): (-0.355933, -0.364133, -0.428069),
    (1, 255, 3): (-1.030715, -1.078224, -1.201421),
}
LOSS = {"A": 6.659662, "B": 6.653608, "C": 6.671990}
GRADIENT_NORMS = {
    "transformer.wte.weight": 0.08436856,
    "lm_head.weight": 0.6961062,
    "transformer.h.0.attn.c_q.weight": 0.1490546,
    "transformer.h.0.attn.c_k.weight": 0.1489528,
    "transformer.h.1.attn.c_v.weight": 0.1264259,
    "transformer.h.1.attn.ve_gate.weight": 0.003079772,
    "transformer.h.2.attn.c_proj.weight": 0.1034130,
    "transformer.h.2.mlp.c_fc.weight": 0.2941302,
    "transformer.h.3.mlp.c_proj.weight": 0.5201884,
    "value_embeds.1.weight": 0.01024343,
    "value_embeds.3.weight": 0.006460864,
    "resid_lambdas": 0.08063953,
    "x0_lambdas": 0.04124675,
    "smear_gate.weight": 0.01168450,
}


def test_closed_form_entries():
    assert closed_form((512, 256), 1, 1.0, 0)[0, 0].item() == pytest.approx(0.092414707, abs=1e-8)
    assert closed_form((512, 256), 1, 1.0, 0)[511, 255].item() == pytest.approx(0.105878539, abs=1e-8)
    assert closed_form((1024, 256), 7, 0.1, 3)[1023, 255].item() == pytest.approx(0.080777921, abs=1e-8)
    assert closed_form((256, 1024), 8, 0.05, 3)[255, 1023].item() == pytest.approx(-0.035063680, abs=1e-8)


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_logits_and_loss(name):
    model = golden_model(WINDOWS[name])
    ids, targets = golden_tokens(256)
    with torch.no_grad():
        logits = model(ids)
        loss = model(ids, targets).mean().item()
    column = "ABC".index(name)
    for (b, t, v), expected in LOGITS.items():
        assert logits[b, t, v].item() == pytest.approx(expected[column], abs=1e-5), (b, t, v)
    assert loss == pytest.approx(LOSS[name], abs=1e-5)


def test_gradients():
    model = golden_model(WINDOWS["A"])
    ids, targets = golden_tokens(256)
    model(ids, targets).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, expected in GRADIENT_NORMS.items():
        assert gradients[name].norm().item() == pytest.approx(expected, rel=1e-5), name
    assert gradients["smear_lambda"].item() == pytest.approx(0.0179872, rel=1e-5)
    assert gradients["backout_lambda"].item() == pytest.approx(-0.0214810, rel=1e-5)


def test_init_logits_do_not_depend_on_depth():
    ids, targets = golden_tokens(256)
    losses = []
    for depth in (4, 3):
        model = golden_model([None] * depth)
        with torch.no_grad():
            for block in model.blocks:
                block.attn.c_proj.weight.zero_()
                block.mlp.c_proj.weight.zero_()
            model.smear_lambda.zero_()
            losses.append(model(ids, targets).mean().item())
    assert losses == pytest.approx([6.718322, 6.718322], abs=1e-5)


def test_bpb_of_the_tiny_model():
    model = golden_model(WINDOWS["A"])
    ids, targets = golden_tokens(256)
    with torch.no_grad():
        nats = model(ids, targets).double()
    byte_lengths = targets % 5
    counted = byte_lengths > 0
    total = nats[counted].sum().item()
    assert (int(counted.sum()), int(byte_lengths.sum())) == (405, 1012)
    assert total == pytest.approx(2703.53933, abs=2e-3)
    assert total / (math.log(2) * 1012) == pytest.approx(3.854133, abs=3e-6)


def test_rope_sign():
    x = torch.zeros(1, 2, 1, 128)
    x[..., 0] = 1
    y = rotate(x, *rope_table(2, 128, 100_000.0, device="cpu", dtype=torch.float32))
    assert y[0, 1, 0, 0].item() == pytest.approx(math.cos(1), abs=1e-6)
    assert y[0, 1, 0, 64].item() == pytest.approx(-math.sin(1), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((4, 256, 2, 1024, 512), 3_670_098),
        ((3, 256, 2, 1024, 512), 2_883_664),
        ((2, 128, 1, 512, 512), 589_866),
        ((4, 256, 2, 1024, 32_768), 36_700_242),
        ((12, 768, 6, 3072, 32_768), 286_261_730),
        ((23, 1536, 12, 6016, 32_768), 1_346_766_600),
    ],
)
def test_parameter_counts(shape, count):
    layers, width, heads, mlp, vocab = shape
    model = build_model(tiny_config([None] * layers, width=width, heads=heads, mlp=mlp, vocab=vocab), "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_bf16_compute_stays_near_float32():
    exact = golden_model(WINDOWS["A"])
    rounded = build_model(tiny_config(WINDOWS["A"]), compute_dtype=torch.bfloat16)
    fill_closed_form(rounded)
    ids, targets = golden_tokens(256)
    with torch.no_grad():
        difference = rounded(ids) - exact(ids)
        losses = [model(ids, targets).mean().item() for model in (rounded, exact)]
    assert difference.square().mean().sqrt().item() <= 0.02
    assert abs(losses[0] - losses[1]) <= 5e-3
