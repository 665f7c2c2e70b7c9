"""The gated output norm, interpreted, against the formula in float64."""

import pytest
import torch
from torch import Tensor

from nexttransformer.ops.gated_norm import Activation, gated_norm
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = pytest.mark.interpret
EPS = 1e-5


def expected_norm(o: Tensor, z: Tensor, gain: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """Returns the output in float64."""
    before = z if bias is None else z + bias
    gate = 1 / (1 + torch.exp(-before))
    length = (o.square().sum(-1, keepdim=True) / o.shape[-1] + EPS).sqrt()
    return o / length * gain * (before * gate if activation == "silu" else gate)


def check(o: Tensor, z: Tensor, *, has_bias: bool, activation: Activation, upstream: Tensor) -> None:
    generator = torch.Generator().manual_seed(9)
    named = {"x": o, "z": z, "gain": 1 + 0.3 * torch.randn(o.shape[3], generator=generator)}
    if has_bias:
        named["bias"] = torch.randn(*o.shape[2:], generator=generator)
    fast = {name: leaf(x) for name, x in named.items()}
    exact = {name: leaf(x, torch.float64) for name, x in named.items()}
    actual = gated_norm(fast["x"], fast["z"], fast["gain"], fast.get("bias"), activation=activation, eps=EPS)
    expected = expected_norm(exact["x"], exact["z"], exact["gain"], exact.get("bias"), activation)
    assert actual.is_contiguous() and actual.dtype == torch.bfloat16
    assert_close({"o": actual}, {"o": expected})
    found = gradients([actual], fast, [upstream])
    assert found["dgain"].dtype == torch.float32
    assert_close(found, gradients([expected], exact, [upstream]))


@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("silu", True), ("sigmoid", True)])
@pytest.mark.parametrize(
    ("rows", "num_tokens", "heads", "head_dim"),
    # A program has 16 tokens, backward 128: 33 leaves a part of the first, 131 (over rows) of both.
    [(1, 1, 1, 64), (3, 11, 2, 128), (1, 131, 2, 16), (2, 64, 3, 16)],
)
def test_values_and_gradients(
    rows: int, num_tokens: int, heads: int, head_dim: int, activation: Activation, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    o, z, upstream = (draw(generator, rows, num_tokens, heads, head_dim) for _ in range(3))
    check(o, 2 * z, has_bias=has_bias, activation=activation, upstream=upstream)


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    generator = torch.Generator().manual_seed(1)
    o = draw(generator, 5, 2, 2, 16).transpose(0, 1)
    z = draw(generator, 2, 5, 96)[..., 32:64].unflatten(-1, (2, 16))
    check(o, z, has_bias=True, activation="silu", upstream=draw(generator, 2, 5, 2, 1).expand(-1, -1, -1, 16))


def test_far_gates_and_zero_outputs_stay_finite() -> None:
    o = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)
    z = torch.tensor([-200.0, 200.0], dtype=torch.bfloat16)[None, :, None, None].expand(1, 2, 1, 16)
    for activation in ("silu", "sigmoid"):
        leaves = {"o": leaf(o), "z": leaf(z), "gain": leaf(torch.ones(16))}
        y = gated_norm(leaves["o"], leaves["z"], leaves["gain"], activation=activation, eps=EPS)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), list(leaves.values())))
