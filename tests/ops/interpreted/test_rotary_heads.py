"""Rotary heads, interpreted, against the rotation written as a complex product in float64."""

import pytest
import torch
from torch import Tensor

from nexttransformer.models.layers import rope_table
from nexttransformer.ops.norm import NORM_EPS
from nexttransformer.ops.rotary_heads import rotary_heads
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = pytest.mark.interpret

GAIN = 1.2


def expected_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, row: Tensor | None, factor: Tensor | None):
    """Returns q, k, v in float64: n(x e^{-i angle}) with the pairs (j, j + K/2) as complex numbers."""
    q, k, v = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    turn = torch.complex(cos.double(), -sin.double())[:, None, :]
    rotated = []
    for x in (q, k):
        turned = torch.complex(*x.chunk(2, -1)) * turn
        y = torch.cat((turned.real, turned.imag), -1)
        rotated.append(GAIN * y / (y.square().mean(-1, keepdim=True) + NORM_EPS).sqrt())
    return *rotated, v if row is None or factor is None else v + factor[..., None] * row.view_as(v)


def check(qkv: Tensor, heads: int, row: Tensor | None, factor: Tensor | None, upstream: list[Tensor]) -> None:
    rope = rope_table(qkv.shape[1], qkv.shape[2] // heads // 3, 1e5, device="cpu", dtype=torch.bfloat16)
    given = {name: x for name, x in {"qkv": qkv, "row": row, "factor": factor}.items() if x is not None}
    fast = {name: leaf(x) for name, x in given.items()}
    exact = {name: leaf(x, torch.float64) for name, x in given.items()}
    extra = {"value_row_BTD": fast.get("row"), "value_factor_BTH": fast.get("factor")}
    outputs = rotary_heads(fast["qkv"], *rope, num_heads=heads, qk_gain=GAIN, **extra)
    expected = expected_heads(exact["qkv"], *rope, heads, exact.get("row"), exact.get("factor"))
    for one, other in zip(outputs, expected, strict=True):
        assert one.is_contiguous() and one.dtype == torch.bfloat16
        assert_close({"o": one}, {"o": other})
    assert_close(gradients(outputs, fast, upstream), gradients(expected, exact, upstream))


@pytest.mark.parametrize("has_row", [True, False])
@pytest.mark.parametrize(
    ("rows", "num_tokens", "heads", "head_dim"), [(1, 1, 1, 64), (1, 37, 3, 128), (3, 5, 12, 128), (3, 13, 3, 64)]
)
def test_values_and_gradients(rows: int, num_tokens: int, heads: int, head_dim: int, has_row: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    width = heads * head_dim
    qkv = draw(generator, rows, num_tokens, 3 * width)
    row = draw(generator, rows, num_tokens, width) if has_row else None
    factor = 3 * torch.rand(rows, num_tokens, heads, generator=generator) if has_row else None
    check(qkv, heads, row, factor, [draw(generator, rows, num_tokens, heads, head_dim) for _ in range(3)])


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = draw(generator, 5, 2, 3 * 2 * 64).transpose(0, 1)
    row = draw(generator, 2 * 64, 2, 5).movedim(0, -1)
    factor = torch.rand(2, 2, 5, generator=generator).transpose(1, 2)
    expanded = draw(generator, 2, 5, 2, 1).expand(-1, -1, -1, 64)
    upstream = [expanded, draw(generator, 2, 2, 5, 64).transpose(1, 2), draw(generator, 64, 2, 5, 2).movedim(0, -1)]
    # Copies keep these strides: all values are in use.
    assert not any(leaf(x).is_contiguous() for x in (qkv, row, factor)) and not any(x.is_contiguous() for x in upstream)
    check(qkv, 2, row, factor, upstream)


def test_a_loss_of_v_alone_leaves_q_and_k_without_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = leaf(draw(generator, 2, 3, 3 * 64))
    rope = rope_table(3, 64, 1e5, device="cpu", dtype=torch.bfloat16)
    weight = draw(generator, 2, 3, 1, 64)
    rotary_heads(qkv, *rope, num_heads=1, qk_gain=GAIN).v_BTHK.backward(weight)
    assert qkv.grad is not None
    assert torch.equal(qkv.grad[..., 128:], weight.flatten(2)) and not qkv.grad[..., :128].any()
