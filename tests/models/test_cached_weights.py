"""Casts of weights kept while evaluating: the same bits, never stale, never in the way of gradients."""

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.models.layers import Linear, cached_weights
from nexttransformer.protocol import TEST_V1


def make_model(method: str):
    model = build_model(resolve_method(method_files()[method], TEST_V1), seed=3, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def score(model) -> torch.Tensor:
    ids_BT = torch.arange(2 * 17).view(2, 17) * 7 % TEST_V1.vocab_size
    with torch.no_grad():
        nats_BT = model(ids_BT[:, :-1], ids_BT[:, 1:])
        _, state = model.hidden(ids_BT[:, :9], want_state=True)
        rest, _ = model.hidden(ids_BT[:, 9:], state=state)
        return torch.cat([nats_BT.flatten(), model.head_logits(rest).flatten()])


@pytest.mark.parametrize("method", ["dense_full", "gdn_hybrid", "mhc_lite"])
def test_same_bits_inside_and_outside(method):
    model = make_model(method)
    expected = score(model)
    with cached_weights(model):
        assert torch.equal(score(model), expected)
        assert torch.equal(score(model), expected)
    assert torch.equal(score(model), expected)


def test_each_weight_is_cast_once():
    model = make_model("dense_full")
    with cached_weights(model):
        score(model)
        with torch.no_grad():
            again = [layer.cast_weight(torch.bfloat16) for layer in linears(model)]
            third = [layer.cast_weight(torch.bfloat16) for layer in linears(model)]
        assert all(one is other for one, other in zip(again, third, strict=True))
    with torch.no_grad():
        assert linears(model)[0].cast_weight(torch.bfloat16) is not again[0]


def linears(model) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def test_changed_weights_are_cast_anew():
    model, other = make_model("dense_full"), make_model("dense_full")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = score(other)
    with cached_weights(model):
        before = score(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        assert torch.equal(score(model), expected) and not torch.equal(before, expected)
    # Nothing of one evaluation is left for the next.
    assert all(layer.cache is None for layer in linears(model))


def test_gradients_flow_and_failures_leave_nothing():
    model = make_model("dense_full")
    ids_BT = torch.arange(34).view(2, 17)
    with pytest.raises(ZeroDivisionError), cached_weights(model):
        score(model)
        model(ids_BT[:, :-1], ids_BT[:, 1:]).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        raise ZeroDivisionError
    assert all(layer.cache is None for layer in linears(model))
