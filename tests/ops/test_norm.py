"""The norm and the squared norm against float64 formulas, whose gradients autograd makes."""

import pytest
import torch

from nexttransformer.ops import norm
from nexttransformer.ops.norm import rms_norm, squared_norm


@pytest.fixture(params=["autograd", "written out"], autouse=True)
def gradient_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms for any type of tensor."""
    monkeypatch.setattr(norm, "has_written_out_gradient", lambda x: request.param == "written out")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("eps", [2.0**-23, 0.5])
@pytest.mark.parametrize("shape", [(2, 5, 96), (3, 1), (7,)])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    x, upstream = draw(*shape).requires_grad_(), draw(*shape, seed=1)
    exact = x.detach().double().requires_grad_()
    found, expected = rms_norm(x, eps), exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    (gradient,), (wanted,) = torch.autograd.grad(found, x, upstream), torch.autograd.grad(expected, exact, upstream)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=2e-6)


def test_rms_norm_of_zeros_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(rms_norm(x).sum(), x)
    assert torch.equal(rms_norm(x), x) and torch.allclose(gradient, torch.full((2, 4), 2.0**11.5))


def test_squared_norm() -> None:
    x, upstream = draw(2, 5, 96).requires_grad_(), draw(2, 5, seed=1)
    found = squared_norm(x)
    torch.testing.assert_close(found.double(), x.double().square().sum(-1), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    torch.testing.assert_close(gradient, 2 * upstream[..., None] * x.detach())


@pytest.mark.parametrize("function", [rms_norm, squared_norm])
def test_bfloat16_is_computed_in_float32(function, gradient_form, request) -> None:
    """One rounding of the result and one of the gradient; written out, nothing but x itself is kept at x's size."""
    x = draw(4, 512).bfloat16().requires_grad_()
    exact = x.detach().float().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = function(x)
    expected = function(exact)
    assert torch.equal(found, expected.to(found.dtype))
    upstream = draw(*found.shape, seed=1).to(found.dtype)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    (wanted,) = torch.autograd.grad(expected, exact, upstream.float())
    torch.testing.assert_close(gradient, wanted.bfloat16(), rtol=2**-7, atol=1e-6)
    if "written out" in request.node.name:
        assert [tensor.dtype for tensor in kept if tensor.numel() == x.numel()] == [torch.bfloat16]


def test_which_form_runs(monkeypatch) -> None:
    monkeypatch.undo()
    assert norm.has_written_out_gradient(draw(2).bfloat16()) and not norm.has_written_out_gradient(draw(2))
