"""Sinkhorn's rounds, interpreted, against the same rounds in float64."""

import pytest
import torch
from torch import Tensor

from nexttransformer.ops.sinkhorn import sinkhorn
from tests.ops.interpreted.comparison import assert_close, gradients, leaf

pytestmark = pytest.mark.interpret


def expected(logits: Tensor, num_rounds: int, eps: float) -> Tensor:
    """Returns the matrices by scaling rows and columns of the start, never the matrix itself."""
    start = torch.softmax(logits, -1) + eps
    rows, columns = torch.ones_like(start[..., 0]), torch.ones_like(start[..., 0])
    for i in range(num_rounds):
        rows = 1 / (start @ columns[..., None])[..., 0] if i else rows
        columns = 1 / (start.mT @ rows[..., None])[..., 0]
    return rows[..., :, None] * start * columns[..., None, :]


@pytest.mark.parametrize("num_rounds", [1, 2, 20])
@pytest.mark.parametrize(("rows", "tokens", "num_streams"), [(2, 40, 4), (1, 33, 3), (3, 1, 2)])
def test_values_and_gradients(rows, tokens, num_streams, num_rounds):
    generator = torch.Generator().manual_seed(num_rounds)
    shape = (rows, tokens, num_streams, num_streams)
    logits, upstream = 3 * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    fast, exact = {"logits": leaf(logits)}, {"logits": leaf(logits, torch.float64)}
    actual = sinkhorn(fast["logits"], num_rounds=num_rounds, eps=1e-6)
    wanted = expected(exact["logits"], num_rounds, 1e-6)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), wanted, rtol=2e-5, atol=1e-7)
    assert_close({"o": actual}, {"o": wanted})
    found, right = gradients([actual], fast, [upstream]), gradients([wanted], exact, [upstream])
    torch.testing.assert_close(found["dlogits"].double(), right["dlogits"], rtol=1e-3, atol=2e-6)


def test_far_logits_stay_finite():
    """As at initialization: the diagonal at 0, all others at -8; and much farther."""
    for far in (-8.0, -80.0):
        logits = leaf(far * (1 - torch.eye(4))[None, None].expand(1, 5, 4, 4))
        res = sinkhorn(logits, num_rounds=20, eps=1e-6)
        torch.testing.assert_close(res.sum(-2), torch.ones(1, 5, 4), atol=1e-6, rtol=0)
        (gradient,) = torch.autograd.grad(res.square().sum(), logits)
        assert gradient.isfinite().all()
