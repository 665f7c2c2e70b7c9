"""Convolved heads, interpreted, against PyTorch's grouped convolution in float64."""

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from nexttransformer.ops.convolved_heads import convolved_heads
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = pytest.mark.interpret


def expected_heads(qkv: Tensor, taps: Tensor, heads: int, row: Tensor | None, factor: Tensor | None):
    """Returns q, k, v in float64."""
    padded = functional.pad(qkv.mT, (3, 0))
    y = functional.conv1d(padded, taps[:, None], groups=qkv.shape[2]).mT
    h = y / (1 + torch.exp(-y))
    q, k, v = h.reshape(*h.shape[:2], 3, heads, -1).unbind(2)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return q, k, v if row is None or factor is None else v + factor[..., None] * row.view_as(v)


def check(qkv: Tensor, heads: int, row: Tensor | None, factor: Tensor | None, upstream: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(9)
    taps = torch.rand(qkv.shape[2], 4, generator=generator) - 0.5
    named = {"qkv": qkv, "taps": taps, "row": row, "factor": factor}
    given = {name: x for name, x in named.items() if x is not None}
    fast = {name: leaf(x) for name, x in given.items()}
    exact = {name: leaf(x, torch.float64) for name, x in given.items()}
    extra = {"value_row_BTD": fast.get("row"), "value_factor_BTH": fast.get("factor")}
    outputs = convolved_heads(fast["qkv"], fast["taps"], num_heads=heads, **extra)
    expected = expected_heads(exact["qkv"], exact["taps"], heads, exact.get("row"), exact.get("factor"))
    for one, other in zip(outputs, expected, strict=True):
        assert one.is_contiguous() and one.dtype == torch.bfloat16
        assert_close({"o": one}, {"o": other})
    actual = gradients(outputs, fast, upstream)
    assert actual["dtaps"].dtype == torch.float32
    assert_close(actual, gradients(expected, exact, upstream))


@pytest.mark.parametrize("has_row", [True, False])
@pytest.mark.parametrize(
    ("rows", "num_tokens", "heads", "head_dim"),
    # A program has 16 tokens, backward 4 pieces of 9: 33 and 70 leave a part of both, 37 begins a program with one.
    [(1, 1, 1, 64), (2, 33, 2, 128), (3, 3, 2, 64), (1, 70, 2, 16), (2, 37, 1, 16)],
)
def test_values_and_gradients(rows: int, num_tokens: int, heads: int, head_dim: int, has_row: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    width = heads * head_dim
    qkv = draw(generator, rows, num_tokens, 3 * width)
    row = draw(generator, rows, num_tokens, width) if has_row else None
    factor = 3 * torch.rand(rows, num_tokens, heads, generator=generator) if has_row else None
    check(qkv, heads, row, factor, [draw(generator, rows, num_tokens, heads, head_dim) for _ in range(3)])


def test_a_length_that_the_backward_pass_would_overrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from nexttransformer.ops.convolved_heads import fused

    monkeypatch.setattr(fused, "_LENGTH", 64)
    with pytest.raises(AssertionError, match="three steps at a time"):
        convolved_heads(torch.ones(1, 5, 48, dtype=torch.bfloat16), torch.ones(48, 4), num_heads=1)


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = draw(generator, 5, 2, 3 * 2 * 64).transpose(0, 1)
    row = draw(generator, 2 * 64, 2, 5).movedim(0, -1)
    factor = torch.rand(2, 2, 5, generator=generator).transpose(1, 2)
    expanded = draw(generator, 2, 5, 2, 1).expand(-1, -1, -1, 64)
    upstream = [expanded, draw(generator, 2, 2, 5, 64).transpose(1, 2), draw(generator, 64, 2, 5, 2).movedim(0, -1)]
    check(qkv, 2, row, factor, upstream)


def test_a_later_token_changes_no_earlier_output_and_gets_no_earlier_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    qkv, taps = draw(generator, 1, 40, 3 * 64), torch.rand(3 * 64, 4, generator=generator)
    changed = qkv.clone()
    changed[:, 35] += 1
    for one, other in zip(*(convolved_heads(x, taps, num_heads=1) for x in (qkv, changed)), strict=True):
        assert torch.equal(one[:, :35], other[:, :35]) and not torch.equal(one[:, 35:39], other[:, 35:39])
        assert torch.equal(one[:, 39:], other[:, 39:])
    source = leaf(qkv)
    convolved_heads(source, taps, num_heads=1).v_BTHK[:, 20].sum().backward()
    assert source.grad is not None
    reached = source.grad[0, :, 128:].abs().sum(-1).nonzero().flatten().tolist()
    assert reached == [17, 18, 19, 20]


@pytest.mark.parametrize("cut", [1, 2, 35])
def test_a_continued_sequence_equals_the_whole(cut: int) -> None:
    """The first part runs fused, its continuation from the cached inputs does not: the same values but for rounding."""
    generator = torch.Generator().manual_seed(4)
    qkv, taps = draw(generator, 2, 40, 3 * 64), torch.rand(3 * 64, 4, generator=generator) - 0.5
    row, factor = draw(generator, 2, 40, 64), torch.rand(2, 40, 1, generator=generator)
    cache = functional.pad(qkv, (0, 0, 3, 0))[:, cut : cut + 3]
    parts = []
    for part, before in ((slice(cut), None), (slice(cut, None), cache)):
        extra = {"value_row_BTD": row[:, part], "value_factor_BTH": factor[:, part], "cache_BIE": before}
        parts.append(convolved_heads(qkv[:, part], taps, num_heads=1, **extra))
    whole = convolved_heads(qkv, taps, num_heads=1, value_row_BTD=row, value_factor_BTH=factor)
    for first, second, expected in zip(*parts, whole, strict=True):
        assert second.dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=2**-7, atol=1e-6)
