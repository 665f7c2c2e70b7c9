"""The custom operations around fla-core (stand-in kernels): argument order, gradients, fake shapes, one graph."""

import pytest
import torch

from nexttransformer.ops import backends
from nexttransformer.ops.gated_delta_rule import fused as gdn
from nexttransformer.ops.gated_delta_rule.naive import gated_delta_rule_chunk
from nexttransformer.ops.kimi_delta_attention import fused as kda
from nexttransformer.ops.kimi_delta_attention.naive import kimi_delta_attention_chunk
from tests.ops.fla_stub import FlaStub
from tests.ops.recurrent_inputs import delta_inputs

RUNS = {
    "gdn": (gdn.run_fla, gated_delta_rule_chunk, False),
    "gdn_broadcast": (gdn.run_kda_broadcast, gated_delta_rule_chunk, False),
    "kda": (kda.run_fla, kimi_delta_attention_chunk, True),
}


@pytest.fixture
def stub(monkeypatch):
    stub = FlaStub()
    stub.install(monkeypatch)
    backends.forget_choices()
    yield stub
    backends.forget_choices()


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("name", RUNS)
def test_values_and_gradients(stub, name, num_tokens, has_state):
    run, reference, per_channel = RUNS[name]
    inputs = delta_inputs(num_tokens, per_channel=per_channel)
    q, k, v, g, beta, start = inputs
    initial = start if has_state else None
    leaves = inputs if has_state else inputs[:5]
    o, state = run(q, k, v, g, beta, initial, has_state)
    expected_o, expected_state = reference(q, k, v, g, beta, initial_state_BHKV=initial)
    assert (state is not None) == has_state
    torch.testing.assert_close(o, expected_o)
    outputs, expected = ([o, state], [expected_o, expected_state]) if has_state else ([o], [expected_o])
    if has_state:
        torch.testing.assert_close(state, expected_state)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in expected]
    actual = torch.autograd.grad(outputs, leaves, weights)
    for left, right in zip(actual, torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_state_alone_gets_a_gradient(stub):
    q, k, v, g, beta, initial = delta_inputs(20, per_channel=False)
    _, state = gdn.run_fla(q, k, v, g, beta, initial, True)
    assert state is not None
    (gradient,) = torch.autograd.grad(state.sum(), k)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_registration(stub, name, has_state):
    operation = {"gdn": gdn._forward, "kda": kda._forward}[name]
    inputs = delta_inputs(66, per_channel=name == "kda", rows=1)
    arguments = (*inputs[:5], inputs[5] if has_state else None, has_state)
    torch.library.opcheck(
        operation, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


@pytest.mark.parametrize("name", RUNS)
def test_compiles_to_one_graph(stub, name):
    run, _, per_channel = RUNS[name]
    inputs = delta_inputs(70, per_channel=per_channel)

    def loss(q, k, v, g, beta):
        o, _ = run(2 * q, k, v, g, beta, None, False)
        return o.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(*inputs[:5]), inputs[:5])
    expected = torch.autograd.grad(loss(*inputs[:5]), inputs[:5])
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_chosen_path_is_followed(stub):
    inputs = [x.detach() for x in delta_inputs(10, per_channel=False)]
    for path, expected in (("fla", ["gdn_forward"]), ("kda_broadcast", ["kda_forward"]), ("reference", [])):
        stub.calls.clear()
        backends.choose(backends.Choice("gated_delta_rule", path, "test"))
        compiled = torch.compile(gdn.gated_delta_rule_fused, fullgraph=True, backend="eager")
        compiled(*inputs[:5])
        assert stub.calls == expected
    backends.choose(backends.Choice("kimi_delta_attention", "reference", "test"))
    assert kda.kimi_delta_attention_fused(*[x.detach() for x in delta_inputs(10, per_channel=True)][:5])[1] is None


def test_without_fla_core_the_reference_runs_with_one_warning(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: None)
    backends.forget_choices()
    with pytest.warns(RuntimeWarning, match="several times slower: fla-core is not installed"):
        assert backends.ensure_path("kimi_delta_attention") == "reference"
    assert backends.ensure_path("kimi_delta_attention") == "reference"
    assert backends.choices()[0]["reason"] == "no_fla_core"
    backends.forget_choices()
