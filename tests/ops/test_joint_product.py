"""The joint product against separate ones: values, and every gradient."""

import pytest
import torch
import torch.nn.functional as functional

from nexttransformer.ops.joint_product import joint_product


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 5), (1, 2, 3, 4)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_equals_separate_products(sizes: tuple[int, ...], is_compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, weights, upstream = draw(2, 7, 6), [draw(size, 6) for size in sizes], draw(2, 7, sum(sizes)).detach()
    run = torch.compile(joint_product, backend="aot_eager", fullgraph=True) if is_compiled else joint_product
    joint = run(x, *weights)
    separate = torch.cat([functional.linear(x, weight) for weight in weights], dim=-1)
    torch.testing.assert_close(joint, separate)
    actual = torch.autograd.grad(joint, [x, *weights], upstream)
    expected = torch.autograd.grad(separate, [x, *weights], upstream)
    torch.testing.assert_close(actual, expected)
    assert torch.autograd.gradcheck(joint_product, (x, *weights))
