"""The order of a pass's tokens, and that all tables of a model share it where gradients are recorded."""

import sys

import pytest
import torch
from torch import Tensor

from nexttransformer.models import Decoder, build_model, decoder
from nexttransformer.ops import lookup_gradient
from nexttransformer.ops.backends import is_fused
from nexttransformer.ops.lookup_gradient.order import order_tokens
from tests.models.tiny import fill_closed_form, golden_tokens, tiny_config
from tests.ops.lookup_stub import install_lookup_gradient


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_order(dtype: torch.dtype) -> None:
    ids = torch.tensor([[3, 0, 3], [5, 3, 0]], dtype=dtype)
    order = order_tokens(ids, 6)
    assert order.tokens_N.tolist() == [1, 5, 0, 2, 4, 3]
    assert order.ids_N.tolist() == [0, 0, 3, 3, 3, 5]
    assert order.starts.tolist() == [0, 2, 2, 2, 5, 5, 6]
    assert {x.dtype for x in order} == {torch.int32}


@pytest.mark.parametrize("num_rows", [2**15, 2**15 + 1, 100_000])
def test_order_at_the_ends_of_large_tables(num_rows: int) -> None:
    ids = torch.tensor([num_rows - 1, 0, num_rows - 1, 2**15 - 1])
    order = order_tokens(ids, num_rows)
    assert order.ids_N.tolist() == sorted(ids.tolist())
    assert order.tokens_N.tolist() == ids.sort(stable=True).indices.tolist()
    assert order.starts[[0, 1, num_rows - 1, num_rows]].tolist() == [0, 1, 2 if num_rows > 2**15 else 1, 4]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Returns a model whose lookups have the gradient of the GPU, in plain PyTorch."""
    name = "nexttransformer.ops.lookup_gradient.fused"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    install_lookup_gradient()
    monkeypatch.setattr(lookup_gradient, "is_fused", lambda op, x, *, item_bytes: x.element_size() == item_bytes)
    model = build_model(tiny_config([None] * 3, width=128, heads=1, mlp=128), compute_dtype=torch.bfloat16)
    fill_closed_form(model)
    return model


def test_all_tables_share_one_order(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, targets = golden_tokens(32)
    orders: list[Tensor] = []

    def counted(ids: Tensor, num_rows: int) -> lookup_gradient.LookupOrder:
        orders.append(ids)
        return order_tokens(ids, num_rows)

    monkeypatch.setattr(lookup_gradient, "order_tokens", counted)
    gradients = []
    for is_fused_now in (True, False):
        if not is_fused_now:
            monkeypatch.setattr(lookup_gradient, "is_fused", is_fused)
        model.zero_grad()
        model(ids, targets).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert len(orders) == 1
    for name, wanted in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], wanted, rtol=1e-5, atol=1e-7)


def test_nothing_is_sorted_without_gradients(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(ids: Tensor, num_rows: int) -> lookup_gradient.LookupOrder:
        raise AssertionError("sorted")

    monkeypatch.setattr(lookup_gradient, "order_tokens", refused)
    ids, _ = golden_tokens(16)
    with torch.no_grad():
        _, state = model.hidden(ids[:, :8], want_state=True)
        model.hidden(ids[:, 8:], state=state, want_state=True)
    table = torch.zeros(512, 8)
    assert decoder.lookup_order(ids, table, torch.bfloat16) is None
    assert decoder.lookup_order(ids, table.requires_grad_(), torch.float32) is None
    with pytest.raises(AssertionError, match="sorted"):
        model.hidden(ids)
