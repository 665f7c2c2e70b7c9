"""Options of softmax attention: pinned counts, equations, and the properties each method must prove."""

import pytest
import torch

from nexttransformer.config import ModelConfig, method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.models.budget import matched_mlp_width, measure_config, reference_budget
from nexttransformer.models.mixers import attention
from nexttransformer.models.mixers.attention import VALUE_SQUARE_FLOOR, Attention, exclude_own_value
from nexttransformer.models.parts import MixerInput, Rope
from nexttransformer.models.state import map_state
from nexttransformer.protocol import get_protocol
from tests.models.randomize import random_ids, randomize

# method -> (parameters, MLP width under formal-v1, deviation of training FLOPs in percent)
PINNED = {
    "xsa": (1_355_810_568, 6144, 0.01),
    "xsa_learned": (1_355_810_844, 6144, 0.01),
    "gated_attn_head": (1_356_234_504, 6144, 0.05),
    "gated_attn_element": (1_355_810_568, 5376, 0.0),
    "fox": (1_356_234_780, 6144, 0.05),
    "gated_gdn_hybrid": (1_392_929_056, 5888, -0.28),
    "mhc_lite_gdn_hybrid": (1_392_340_842, 5952, -0.14),
    "mhc_lite_gdn_hybrid_xsa": (1_392_340_842, 5952, -0.14),
}
VARIANTS = ["xsa", "xsa_learned", "gated_attn_head", "gated_attn_element", "fox"]


def config_of(method: str) -> ModelConfig:
    return resolve_method(method_files()[method], "test-v1")


def randomized(method: str):
    model = build_model(config_of(method))
    randomize(model)
    return model


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixer_of(model) -> Attention:
    mixer = model.blocks[-1].attn
    assert isinstance(mixer, Attention)
    return mixer


@pytest.mark.parametrize("method", sorted(PINNED))
def test_counts_and_budget(method):
    protocol = get_protocol("formal-v1")
    config = resolve_method(method_files()[method], protocol)
    budget, reference = measure_config(config), reference_budget(protocol)
    num_parameters, mlp_width, deviation_percent = PINNED[method]
    assert budget.num_parameters == num_parameters
    assert (config.mlp_width, matched_mlp_width(config, protocol)) == (mlp_width, mlp_width)
    deviation = 100 * (budget.macs_per_token / reference.macs_per_token - 1)
    assert deviation == pytest.approx(deviation_percent, abs=0.0051)


def test_tags_and_shapes_of_new_parameters():
    expected = {
        "xsa": {},
        "xsa_learned": {"exclusive_scale": ((1,), "small")},
        "gated_attn_head": {"c_gate.weight": ((1, 64), "small")},
        "gated_attn_element": {"c_gate.weight": ((64, 64), "matrix")},
        "fox": {"f_gate.weight": ((1, 64), "small"), "f_bias": ((1,), "small")},
    }
    base = set(build_model(config_of("dense_full"), "meta").parameter_specs())
    heads = config_of("dense_full").num_heads
    for method, parameters in expected.items():
        specs = build_model(config_of(method), "meta").parameter_specs()
        found = {name: (spec.shape, spec.tag) for name, spec in specs.items() if name not in base}
        assert found == {
            f"transformer.h.{layer}.attn.{name}": (tuple(heads if side == 1 else side for side in shape), tag)
            for layer in range(4)
            for name, (shape, tag) in parameters.items()
        }, method


def test_forget_gates_start_near_one():
    config = config_of("fox")
    model = build_model(config.model_copy(update={"num_heads": 4, "head_dim": 16}))
    torch.testing.assert_close(mixer_of(model).f_bias.detach(), torch.tensor([4.0, 4 + 4 / 3, 4 + 8 / 3, 8.0]))


@pytest.mark.parametrize("method", VARIANTS)
def test_equal_to_the_base_at_init(method):
    config = config_of(method)
    # The matched MLP width may differ from the base's; its output is zero.
    base = config_of("dense_full").model_copy(update={"mlp_width": config.mlp_width})
    ids = random_ids(config)
    with torch.no_grad():
        logits = [build_model(each, seed=1)(ids) for each in (config, base)]
    torch.testing.assert_close(*logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("method", "tolerance"), [("xsa_learned", 1e-5), ("fox", 0.05)])
def test_near_the_base_with_trained_base_weights(method, tolerance):
    config = config_of(method)
    model = build_model(config, seed=1)
    base = build_model(config_of("dense_full").model_copy(update={"mlp_width": config.mlp_width}), seed=1)
    randomize(base)
    model.load_state_dict(base.state_dict(), strict=False)
    if method == "fox":
        for block in model.blocks:
            block.attn.f_bias.data.fill_(12.0)
    ids = random_ids(config)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), base(ids), atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", [*VARIANTS, "gated_gdn_hybrid", "mhc_lite_gdn_hybrid_xsa"])
def test_causality_batch_independence_and_prefix(method):
    model = randomized(method)
    ids = random_ids(model.config, rows=2)
    with torch.no_grad():
        logits = model(ids)
        for t in (1, 63, 64, 65, 127):
            changed = ids.clone()
            changed[:, t:] = (changed[:, t:] + 7) % model.config.vocab_size
            assert torch.equal(model(changed)[:, :t], logits[:, :t]), t
        torch.testing.assert_close(model(ids[1:]), logits[1:], atol=1e-5, rtol=0)
        for t in (1, 2, 65):
            torch.testing.assert_close(model(ids[:, :t]), logits[:, :t], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("method", VARIANTS)
def test_state_passing(method, window):
    config = config_of(method)
    layers = [{**layer, "window": window} for layer in config.layers]
    model = build_model(config.model_copy(update={"layers": layers}))
    randomize(model)
    ids = random_ids(config, rows=2)
    with torch.no_grad():
        whole = model(ids)
        first, state = model.hidden(ids[:, :50], want_state=True)
        second, state = model.hidden(ids[[1, 0], 50:51], state=map_state(lambda x: x[[1, 0]], state), want_state=True)
        third, _ = model.hidden(ids[[1, 0], 51:], state=state)
        joined = torch.cat([first, second[[1, 0]], third[[1, 0]]], dim=1)
        torch.testing.assert_close(model.head_logits(joined), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", VARIANTS)
def test_every_new_parameter_gets_a_gradient(method):
    model = randomized(method)
    ids = random_ids(model.config, rows=2)
    model(ids[:, :-1], ids[:, 1:]).mean().backward()
    for name, parameter in model.named_parameters():
        if ".attn." in name:
            assert parameter.grad is not None, name
            assert (parameter.grad.reshape(parameter.shape[0], -1).abs().amax(1) > 0).all(), name
            assert (parameter.grad.reshape(-1, parameter.shape[-1]).abs().amax(0) > 0).all(), name


def test_exclude_own_value():
    y, v = normal(2, 5, 3, 8), normal(2, 5, 3, 8, seed=2)
    fixed = exclude_own_value(y, v, None)
    torch.testing.assert_close((fixed * v).sum(-1), torch.zeros(2, 5, 3), atol=1e-5, rtol=0)
    expected = y - torch.einsum("bthk,bthk->bth", y, v)[..., None] * v / v.norm(dim=-1, keepdim=True) ** 2
    torch.testing.assert_close(fixed, expected, atol=1e-5, rtol=1e-5)
    scale = torch.tensor([0.0, 0.5, -1.0])
    share = torch.tanh(scale)[:, None]
    torch.testing.assert_close(exclude_own_value(y, v, scale), y + share * (expected - y), atol=1e-5, rtol=1e-5)
    assert torch.equal(exclude_own_value(y, torch.zeros_like(v), None), y)


@pytest.mark.parametrize("is_written_out", [False, True])
@pytest.mark.parametrize("is_learned", [False, True])
def test_gradients_of_exclude_own_value(is_learned, is_written_out, monkeypatch):
    """Against autograd of the formula in float64; one value is below the floor, where the quotient is fixed."""
    monkeypatch.setattr(attention, "has_written_out_gradient", lambda x: is_written_out)
    y, v, upstream = normal(2, 5, 3, 8), normal(2, 5, 3, 8, seed=2), normal(2, 5, 3, 8, seed=3)
    v[0, 0, 0] = 1e-9
    leaves = [y, v, torch.tensor([0.3, -1.0, 2.0])][: 3 if is_learned else 2]
    fast = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]
    scale = fast[2] if is_learned else None
    found = torch.autograd.grad(exclude_own_value(fast[0], fast[1], scale), fast, upstream)
    y64, v64 = exact[:2]
    share = (y64 * v64).sum(-1, keepdim=True) / v64.square().sum(-1, keepdim=True).clamp_min(VALUE_SQUARE_FLOOR)
    amount = torch.tanh(exact[2])[:, None] if is_learned else 1.0
    wanted = torch.autograd.grad(y64 - amount * share * v64, exact, upstream.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def run_last_mixer(model, x_BTD):
    """Runs the last layer's mixer with W_o = I on one input; returns the heads' outputs and the value rows used."""
    mixer = mixer_of(model)
    mixer.c_proj.weight.data.copy_(torch.eye(model.config.width))
    rope = model.rope(0, x_BTD.shape[1], x_BTD.device)
    row = normal(*x_BTD.shape, seed=1)
    with torch.no_grad():
        y, state = mixer(MixerInput(x_BTD, x_BTD, x_BTD), row, Rope(rope.cos, rope.sin), want_state=True)
    return y.unflatten(-1, (model.config.num_heads, -1)), state


def base_with(model):
    """Returns a plain-attention model with the same base weights."""
    base = build_model(config_of("dense_full").model_copy(update={"mlp_width": model.config.mlp_width}))
    own = model.state_dict()
    base.load_state_dict({name: own[name] for name in base.state_dict()})
    return base


def test_exclusive_output_has_no_part_along_the_value_that_attention_used():
    model = randomized("xsa")
    y, state = run_last_mixer(model, normal(2, 9, 64))
    # The state's v holds the value embedding.
    direction = torch.nn.functional.normalize(state.v_BSHK, dim=-1)
    torch.testing.assert_close((y * direction).sum(-1), torch.zeros(y.shape[:3]), atol=1e-5, rtol=0)
    own, _ = run_last_mixer(base_with(model), normal(2, 9, 64))
    assert (own * direction).sum(-1).abs().min() > 1e-4


@pytest.mark.parametrize("method", ["gated_attn_head", "gated_attn_element"])
def test_gate_multiplies_the_heads_before_the_output_projection(method):
    model = randomized(method)
    x = normal(2, 9, 64)
    gate = torch.sigmoid(x @ mixer_of(model).c_gate.weight.t()).unflatten(-1, (model.config.num_heads, -1))
    plain, _ = run_last_mixer(base_with(model), x)
    gated, _ = run_last_mixer(model, x)
    torch.testing.assert_close(gated, gate.detach() * plain, atol=1e-6, rtol=1e-5)


def test_output_gate_reads_the_query_input_and_the_forget_gate_the_key_input():
    for method, role in (("gated_attn_head", 0), ("fox", 1)):
        mixer = mixer_of(randomized(method))
        gate = mixer.c_gate if role == 0 else mixer.f_gate
        mixer.c_proj.weight.data.copy_(torch.eye(64))
        seen = []
        gate.register_forward_hook(lambda module, args, output, seen=seen: seen.append(args[0]))
        inputs = MixerInput(*(normal(1, 3, 64, seed=seed) for seed in range(3)))
        table = randomized("dense_full").rope(0, 3, torch.device("cpu"))
        with torch.no_grad():
            mixer(inputs, torch.zeros(1, 3, 64), table)
        assert seen[0] is inputs[role]
