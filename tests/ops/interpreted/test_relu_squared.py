"""The squared-ReLU MLP, interpreted: values, every gradient, every candidate tile."""

import pytest
import torch

from nexttransformer.ops.path_check import error_ratio
from nexttransformer.ops.relu_squared import relu_squared_mlp, relu_squared_mlp_naive
from nexttransformer.ops.relu_squared.tiles import Tile, tiles
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "num_tokens", "width", "mlp_width"), [(1, 1, 64, 64), (1, 77, 192, 320), (3, 43, 128, 576)]
)
def test_values_and_gradients(
    rows: int, num_tokens: int, width: int, mlp_width: int, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    given = {
        "x": draw(generator, rows, num_tokens, width),
        "w1": draw(generator, mlp_width, width) * width**-0.5,
        "w2": draw(generator, width, mlp_width) * mlp_width**-0.5,
    }
    upstream = [draw(generator, rows, num_tokens, width)]
    # Master weights are float32; these hold bfloat16 values, so that both sides see the same.
    fast = {name: leaf(x, torch.bfloat16 if name == "x" else weight_dtype) for name, x in given.items()}
    exact = {name: leaf(x, torch.float64) for name, x in given.items()}
    output, expected = relu_squared_mlp(*fast.values()), relu_squared_mlp_naive(*exact.values())
    assert_close({"o": output}, {"o": expected})
    actual = gradients([output], fast, upstream)
    assert actual["dw1"].dtype == actual["dw2"].dtype == weight_dtype
    assert_close(actual, gradients([expected], exact, upstream))


def test_an_upstream_gradient_that_is_not_contiguous() -> None:
    generator = torch.Generator().manual_seed(3)
    fast = {"x": draw(generator, 1, 9, 64), "w1": draw(generator, 192, 64) / 8, "w2": draw(generator, 64, 192) / 12}
    fast = {name: leaf(x) for name, x in fast.items()}
    exact = {name: leaf(x, torch.float64) for name, x in fast.items()}
    # One row, whose tokens can be flattened without a copy.
    upstream = [draw(generator, 1, 64, 9).mT]
    output, expected = relu_squared_mlp(*fast.values()), relu_squared_mlp_naive(*exact.values())
    assert_close(gradients([output], fast, upstream), gradients([expected], exact, upstream))


@pytest.mark.parametrize(
    ("is_backward", "tile"),
    [(back, tile) for back in (False, True) for tile in tiles(is_backward=back) if not tile.is_specialized],
)
def test_tiles(is_backward: bool, tile: Tile) -> None:
    """Lengths that no tile divides: 300 = 256 + 44 rows, 448 = 256 + 192 columns, 1 1/2 steps of depth."""
    from nexttransformer.ops.relu_squared.fused import product

    generator = torch.Generator().manual_seed(0)
    a, weight = draw(generator, 300, 96), draw(generator, 96, 448) * 96**-0.5
    h = a.double() @ weight.double()
    aux = draw(generator, 300, 448).square() if is_backward else None
    expected = h.relu().square() if aux is None else h * 2 * aux.double().sqrt()
    assert error_ratio(product(a, weight if is_backward else weight.t().contiguous(), 448, aux, tile), expected) < 3e-3
