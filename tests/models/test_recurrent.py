"""Gated DeltaNet, Kimi Delta Attention and their hybrids: sizes, names, initialization, and whole-model behaviour."""

import math
from functools import lru_cache

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import Decoder, build_model
from nexttransformer.models.budget import matched_mlp_width, measure, reference_budget
from nexttransformer.models.state import map_state
from nexttransformer.protocol import get_protocol

# method: parameters, matmul weights (M), MLP width, FLOPs against the baseline (%), recurrent and attention layers
SIZES = {
    "gdn": (1_411_349_680, 757.0, 6144, 0.31, 23, 0),
    "gdn_hybrid": (1_396_861_216, 742.5, 6144, 0.23, 17, 6),
    "kda": (1_410_996_124, 756.6, 6656, 0.25, 23, 0),
    "kda_hybrid": (1_396_993_108, 742.6, 6528, 0.24, 17, 6),
    "gdn_swa": (1_402_875_432, 748.6, 6400, -0.02, 12, 11),
}
MIXERS = {"gdn": 11_851_928, "kda": 10_263_692}
SHAPES = {
    "gdn": {
        "A_log": (12,),
        "norm_gain": (128,),
        "dt_bias": (12,),
        "c_q.weight": (1536, 1536),
        "c_k.weight": (1536, 1536),
        "c_v.weight": (1536, 1536),
        "q_conv.weight": (1536, 4),
        "k_conv.weight": (1536, 4),
        "v_conv.weight": (1536, 4),
        "c_beta.weight": (12, 1536),
        "c_proj.weight": (1536, 1536),
        "ve_gate.weight": (12, 12),
        "c_gate.weight": (1536, 1536),
        "c_decay.weight": (12, 1536),
    },
    "kda": {
        "A_log": (12,),
        "norm_gain": (128,),
        "dt_bias": (1536,),
        "gate_bias": (1536,),
        "c_q.weight": (1536, 1536),
        "c_k.weight": (1536, 1536),
        "c_v.weight": (1536, 1536),
        "q_conv.weight": (1536, 4),
        "k_conv.weight": (1536, 4),
        "v_conv.weight": (1536, 4),
        "c_beta.weight": (12, 1536),
        "c_proj.weight": (1536, 1536),
        "ve_gate.weight": (12, 12),
        "decay_down.weight": (128, 1536),
        "decay_up.weight": (1536, 128),
        "gate_down.weight": (128, 1536),
        "gate_up.weight": (1536, 128),
    },
}
TAGS = {
    "matrix": {"c_q.weight", "c_k.weight", "c_v.weight", "c_gate.weight", "c_proj.weight"},
    "matrix_parity": {"ve_gate.weight"},
    "low_rank": {"decay_down.weight", "decay_up.weight", "gate_down.weight", "gate_up.weight"},
}
METHODS = list(SIZES)
FORMAL = get_protocol("formal-v1")


@lru_cache
def meta_model(method: str) -> Decoder:
    return build_model(resolve_method(method_files()[method], FORMAL), "meta")


@lru_cache
def tiny_model(method: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns a tiny copy with every parameter overwritten: zero outputs would hide almost everything."""
    model = build_model(resolve_method(method_files()[method], "test-v1"), compute_dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
    return model


def tokens(num_tokens: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 512, (rows, num_tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS)
def test_sizes(method):
    num_parameters, num_matmul, mlp_width, deviation, recurrent, attention = SIZES[method]
    model = meta_model(method)
    budget = measure(model)
    assert budget.num_parameters == num_parameters
    assert round(budget.num_matmul / 1e6, 1) == num_matmul
    assert model.config.mlp_width == mlp_width == matched_mlp_width(model.config, FORMAL)
    ratio = budget.training_flops_per_token / reference_budget(FORMAL).training_flops_per_token
    assert round(100 * (ratio - 1), 2) == deviation
    types = [layer["type"] for layer in model.config.layers]
    assert (len(types) - types.count("attention"), types.count("attention")) == (recurrent, attention)


def test_schedules():
    hybrid = [layer["type"] for layer in meta_model("gdn_hybrid").config.layers]
    assert [index for index, kind in enumerate(hybrid) if kind == "attention"] == [3, 7, 11, 15, 19, 22]
    swa = meta_model("gdn_swa").config.layers
    assert all((layer["type"] == "gdn") == (index % 2 == 0) for index, layer in enumerate(swa))
    assert {layer["window"] for layer in swa if layer["type"] == "attention"} == {512}


@pytest.mark.parametrize("method", MIXERS)
def test_names_shapes_and_tags(method):
    mixer = meta_model(method).blocks[0].attn
    shapes = {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
    assert shapes == SHAPES[method]
    assert sum(math.prod(shape) for name, shape in shapes.items() if name != "ve_gate.weight") == MIXERS[method]
    prefix = "transformer.h.0.attn."
    for name, spec in meta_model(method).parameter_specs().items():
        if name.startswith(prefix):
            short = name.removeprefix(prefix)
            assert spec.tag == next((tag for tag, names in TAGS.items() if short in names), "small"), name


@pytest.mark.parametrize("method", MIXERS)
def test_decode_state(method):
    mixer = meta_model(method).blocks[0].attn
    assert mixer.decode_state_bytes(2048) == 786_432 + 3 * 3 * 1536 * 2
    assert mixer.mix_macs(2048) == 12 * (3 * 128 * 128 + 32 * 5 * 128)


@pytest.mark.parametrize(("method", "low"), [("gdn", 0.0), ("kda", 1.0)])
def test_initialization(method, low):
    model = build_model(resolve_method(method_files()[method], "demo-v1"), seed=3)
    mixers = [block.attn for block in model.blocks]
    rate = torch.cat([mixer.A_log for mixer in mixers]).exp()
    assert low <= rate.min() and rate.max() <= 16 and rate.max() > 4
    step = torch.nn.functional.softplus(torch.cat([mixer.dt_bias for mixer in mixers]))
    assert 9.9e-4 < step.min() and step.max() < 0.1001
    for mixer in mixers:
        assert mixer.norm_gain.eq(1).all() and mixer.c_proj.weight.eq(0).all()
        assert 0.45 < mixer.q_conv.weight.abs().max() <= 0.5
        assert mixer.c_q.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    if method == "kda":
        assert all(mixer.gate_bias.eq(0).all() for mixer in mixers)


def test_exact_zero_rate_is_guarded():
    from nexttransformer.ops.decay import draw_rate_log, draw_step_bias

    generator = torch.Generator().manual_seed(0)
    assert torch.isfinite(draw_rate_log(0.0, 1e-30, (1000,), generator)).all()
    assert torch.isfinite(draw_step_bias((10_000,), generator)).all()


@pytest.mark.parametrize("method", METHODS)
def test_step_zero_equals_the_baseline(method):
    ids = tokens(40)
    with torch.no_grad():
        expected = build_model(resolve_method(method_files()["dense_full"], "test-v1"), seed=1)(ids)
        actual = build_model(resolve_method(method_files()[method], "test-v1"), seed=1)(ids)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("method", METHODS)
def test_causality(method):
    model = tiny_model(method)
    ids = tokens(128)
    with torch.no_grad():
        logits = model(ids)
        for t in (1, 63, 64, 65, 127):
            changed = ids.clone()
            changed[:, t:] = (changed[:, t:] + 1) % 512
            other = model(changed)
            assert torch.equal(other[:, :t], logits[:, :t]), t
            assert not torch.allclose(other[:, t], logits[:, t])


@pytest.mark.parametrize("method", METHODS)
def test_batch_independence(method):
    model = tiny_model(method)
    ids = tokens(70, rows=3)
    with torch.no_grad():
        logits = model(ids)
        torch.testing.assert_close(model(ids[1:2])[0], logits[1], atol=1e-5, rtol=0)
        torch.testing.assert_close(model(ids[[2, 0, 1]]), logits[[2, 0, 1]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_prefixes_of_any_length(method):
    model = tiny_model(method)
    ids = tokens(1000, rows=1)
    with torch.no_grad():
        logits = model(ids)
        for length in (1, 2, 63, 64, 65, 500):
            torch.testing.assert_close(model(ids[:, :length]), logits[:, :length], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (60,), (64, 129)])
@pytest.mark.parametrize("method", METHODS)
def test_feeding_in_parts_equals_the_whole(method, cuts):
    model = tiny_model(method)
    ids = tokens(140)
    with torch.no_grad():
        whole, _ = model.hidden(ids)
        parts, state = [], None
        for part in torch.tensor_split(ids, cuts, dim=1):
            h, state = model.hidden(part, state=state, want_state=True)
            parts.append(h)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=0)
        # The state is a pytree with the batch first: one row of it continues that row alone.
        extra = tokens(5, seed=9)
        together, _ = model.hidden(extra, state=state)
        alone, _ = model.hidden(extra[1:], state=map_state(lambda t: t[1:], state))
        torch.testing.assert_close(alone[0], together[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_is_reached(method):
    model = tiny_model(method)
    ids = tokens(128, rows=4)
    model.zero_grad()
    model(ids, tokens(128, rows=4, seed=1)).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name
        if ".attn." in name and parameter.ndim == 2:
            assert parameter.grad.abs().sum(0).gt(0).all() and parameter.grad.abs().sum(1).gt(0).all(), name


@pytest.mark.parametrize("method", ["gdn", "kda"])
def test_bf16_compute_stays_near_float32(method):
    exact, rounded = tiny_model(method), tiny_model(method, torch.bfloat16)
    ids = tokens(128)
    with torch.no_grad():
        error = (rounded(ids) - exact(ids)).square().mean().sqrt() / exact(ids).square().mean().sqrt()
        _, state = rounded.hidden(ids, want_state=True)
    assert error.item() < 0.03 and state is not None
    assert state.mixers[0].recurrent_BHKV.dtype == torch.float32
    assert state.mixers[0].cache_BIE.dtype == torch.bfloat16


def test_negative_eigenvalues_double_the_write():
    config = resolve_method(method_files()["gdn"], "test-v1")
    layers = [{**layer, "negative_eigenvalues": True} for layer in config.layers]
    plain = build_model(config, seed=0).blocks[0].attn
    doubled = build_model(config.model_copy(update={"layers": layers}), seed=0).blocks[0].attn
    x = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(doubled._write_strength(x), 2 * plain._write_strength(x))
