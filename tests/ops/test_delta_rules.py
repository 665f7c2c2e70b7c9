"""Token loop against chunked form of both delta rules, values and every gradient."""

from functools import partial

import pytest
import torch

from nexttransformer.ops.gated_delta_rule import gated_delta_rule
from nexttransformer.ops.gated_delta_rule.naive import gated_delta_rule_chunk, gated_delta_rule_loop
from nexttransformer.ops.kimi_delta_attention import kimi_delta_attention
from nexttransformer.ops.kimi_delta_attention.naive import kimi_delta_attention_chunk, kimi_delta_attention_loop
from tests.ops.recurrent_inputs import delta_inputs, outputs_and_gradients

OPS = {
    "gdn": (gated_delta_rule_loop, gated_delta_rule_chunk, gated_delta_rule),
    "kda": (kimi_delta_attention_loop, kimi_delta_attention_chunk, kimi_delta_attention),
}
LENGTHS = [1, 2, 63, 64, 65, 500, 1000]


@pytest.mark.parametrize("strong", [False, True], ids=["weak", "strong"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name", OPS)
def test_loop_equals_chunk(name, num_tokens, strong):
    loop, chunk, _ = OPS[name]
    inputs = delta_inputs(num_tokens, per_channel=name == "kda", strong=strong, rows=1)
    expected, actual = outputs_and_gradients(loop, inputs), outputs_and_gradients(chunk, inputs)
    for key in expected:
        assert torch.isfinite(actual[key]).all(), key
        assert (actual[key] - expected[key]).abs().max().item() < 1e-5, key


@pytest.mark.parametrize("name", OPS)
def test_exact_in_float64(name):
    loop, chunk, _ = OPS[name]
    inputs = delta_inputs(130, per_channel=name == "kda", dtype=torch.float64)
    expected, actual = outputs_and_gradients(loop, inputs), outputs_and_gradients(chunk, inputs)
    for key in expected:
        assert (actual[key] - expected[key]).abs().max().item() < 1e-13, key


@pytest.mark.parametrize("name", OPS)
def test_gradcheck(name):
    chunk = OPS[name][1]
    inputs = delta_inputs(3, key_dim=2, value_dim=3, per_channel=name == "kda", dtype=torch.float64, rows=1, heads=1)
    assert torch.autograd.gradcheck(lambda *x: chunk(*x[:5], initial_state_BHKV=x[5]), inputs)


@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize("name", OPS)
def test_shapes_in_use(name, key_dim):
    loop, chunk, _ = OPS[name]
    inputs = delta_inputs(100, key_dim=key_dim, value_dim=128, per_channel=name == "kda", rows=1, heads=1)
    expected, actual = outputs_and_gradients(loop, inputs), outputs_and_gradients(chunk, inputs)
    for key in expected:
        assert (actual[key] - expected[key]).abs().max().item() < 1e-5 * max(1, expected[key].abs().max().item()), key


def test_hand_computed_tokens():
    # K = V = 1: decay, delta read of the decayed state, write, output read of the new state.
    q, k, v = (torch.tensor(x).view(1, 2, 1, 1) for x in ([1.0, 0.5], [1.0, 1.0], [2.0, 4.0]))
    g, beta = torch.tensor([0.0, -0.6931472]).view(1, 2, 1), torch.tensor([0.5, 0.25]).view(1, 2, 1)
    # S1 = 0.5 * 2 = 1, o1 = 1. S2 = 0.5 + 0.25 (4 - 0.5) = 1.375, o2 = 0.6875.
    for op, gate in ((gated_delta_rule, g), (kimi_delta_attention, g[..., None])):
        o, state = op(q, k, v, gate, beta, want_state=True)
        assert o.flatten().tolist() == pytest.approx([1.0, 0.6875])
        assert state is not None and state.item() == pytest.approx(1.375)


def test_gdn_equals_kda_with_broadcast_gate():
    inputs = delta_inputs(150, per_channel=False)
    expanded = [*inputs[:3], inputs[3][..., None].expand(-1, -1, -1, 16), *inputs[4:]]
    gdn, _ = gated_delta_rule_chunk(*inputs[:5])
    kda, _ = kimi_delta_attention_chunk(*expanded[:5])
    assert (gdn - kda).abs().max().item() < 1e-6


@pytest.mark.parametrize("cut", [1, 50, 64, 129])
@pytest.mark.parametrize("name", OPS)
def test_state_passing(name, cut):
    op = partial(OPS[name][2], want_state=True)
    inputs = delta_inputs(150, per_channel=name == "kda")
    whole, last = op(*inputs[:5], initial_state_BHKV=inputs[5])
    first, state = op(*(x[:, :cut] for x in inputs[:5]), initial_state_BHKV=inputs[5])
    second, final = op(*(x[:, cut:] for x in inputs[:5]), initial_state_BHKV=state)
    assert (torch.cat([first, second], 1) - whole).abs().max().item() < 1e-5
    assert (final - last).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", OPS)
def test_padding_leaves_the_state_unchanged(name):
    chunk = OPS[name][1]
    inputs = delta_inputs(70, per_channel=name == "kda")
    padded = [torch.cat([x, torch.zeros_like(x[:, :50])], dim=1) for x in inputs[:5]]
    o, state = chunk(*inputs[:5], initial_state_BHKV=inputs[5])
    o_padded, state_padded = chunk(*padded, initial_state_BHKV=inputs[5])
    assert torch.equal(o_padded[:, :70], o) and torch.equal(state_padded, state)


@pytest.mark.parametrize("name", OPS)
def test_bfloat16_inputs(name):
    loop, _, op = OPS[name]
    inputs = [x.detach() for x in delta_inputs(200, per_channel=name == "kda")]
    rounded = [x.bfloat16() for x in inputs[:3]] + inputs[3:5]
    o, state = op(*rounded, want_state=True)
    expected, _ = loop(*(x.float() for x in rounded))
    assert o.dtype == torch.bfloat16 and state is not None and state.dtype == torch.float32
    assert ((o.float() - expected).norm() / expected.norm()).item() < 3e-3
