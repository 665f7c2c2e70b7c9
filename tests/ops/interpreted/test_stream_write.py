"""Writing to residual streams, interpreted, against matrix products in float64."""

import pytest
import torch
from torch import Tensor

from nexttransformer.ops.stream_write import Scaling, stream_write
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = pytest.mark.interpret


def expected(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the new streams and their squared norms in float64: the transposed mixing as a matrix product."""
    streams = given["streams"]
    mixed = given["res"].mT @ streams if "res" in given else streams
    new = mixed + given["post"][..., None] * given["y"][..., None, :]
    if "x0" in given:
        new = given["lambda"] * new + given["mu"] * given["x0"][..., None, :]
    return new, new.square().sum(-1)


def check(given: dict[str, Tensor], upstream: list[Tensor]) -> None:
    fast = {name: leaf(x) for name, x in given.items()}
    exact = {name: leaf(x, torch.float64) for name, x in given.items()}
    scaling = Scaling(fast["lambda"], fast["mu"], fast["x0"]) if "x0" in fast else None
    outputs = stream_write(fast["streams"], fast["y"], fast.get("res"), fast["post"], scaling)
    wanted = expected(exact)
    assert outputs[0].is_contiguous() and outputs[0].dtype == torch.bfloat16 and outputs[1].dtype == torch.float32
    assert_close({"o": outputs[0], "squares": outputs[1]}, {"o": wanted[0], "squares": wanted[1]})
    # The squared norms are those of the rounded streams.
    torch.testing.assert_close(outputs[1], outputs[0].float().square().sum(-1), rtol=1e-5, atol=1e-5)
    assert_close(gradients(outputs, fast, upstream), gradients(wanted, exact, upstream))


def inputs(rows: int, tokens: int, num_streams: int, width: int, *, mixes: bool, scales: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens + num_streams)
    given = {
        "streams": draw(generator, rows, tokens, num_streams, width),
        "y": draw(generator, rows, tokens, width),
        "post": 2 * torch.rand(rows, tokens, num_streams, generator=generator),
    }
    if mixes:
        given["res"] = torch.randn(rows, tokens, num_streams, num_streams, generator=generator)
    if scales:
        given |= {"lambda": torch.tensor(1.1), "mu": torch.tensor(-0.3), "x0": draw(generator, rows, tokens, width)}
    return given


def upstream_of(given: dict[str, Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = given["streams"].shape
    return [draw(generator, *shape), torch.randn(shape[:-1], generator=generator) / 4]


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize(
    # Three streams are padded to four, 576 = 512 + 64 channels take two steps.
    ("rows", "tokens", "num_streams", "width"),
    [(1, 1, 4, 64), (2, 5, 3, 96), (1, 7, 2, 576)],
)
def test_values_and_gradients(rows: int, tokens: int, num_streams: int, width: int, mixes: bool, scales: bool) -> None:
    given = inputs(rows, tokens, num_streams, width, mixes=mixes, scales=scales)
    check(given, upstream_of(given))


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    given = inputs(2, 3, 4, 64, mixes=True, scales=True)
    first = draw(torch.Generator().manual_seed(8), 2, 3, 64)
    given["streams"] = first[:, :, None].expand(-1, -1, 4, -1)
    given["res"] = given["res"].mT
    given["y"] = draw(torch.Generator().manual_seed(9), 3, 2, 64).transpose(0, 1)
    upstream = upstream_of(given)
    check(given, [upstream[0][..., :1].expand(-1, -1, -1, 64), upstream[1]])


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_result_alone(used: int) -> None:
    given = inputs(1, 4, 4, 64, mixes=True, scales=False)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = {name: leaf(x, torch.float64 if dtype == torch.float64 else None) for name, x in given.items()}
        if dtype == torch.float64:
            outputs = expected(leaves)
        else:
            outputs = stream_write(leaves["streams"], leaves["y"], leaves["res"], leaves["post"])
        results.append(gradients([outputs[used]], leaves, [upstream_of(given)[used]]))
    assert_close(*results)
