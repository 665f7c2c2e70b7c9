"""A materialized value is the value, with its gradient, in one compiled graph."""

import torch

from nexttransformer.ops.materialize import materialize


def mix(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (materialize(torch.softmax(logits, -1)).unsqueeze(-1) * x).sum(1)


def test_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, x = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((3, 5), (3, 5, 7)))
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
    found, expected = compiled(logits, x), (torch.softmax(logits, -1).unsqueeze(-1) * x).sum(1)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(3, 7, generator=generator)
    for one, other in zip(*(torch.autograd.grad(out, (logits, x), upstream) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_operation_is_registered_completely() -> None:
    x = torch.randn(4, 3).requires_grad_()
    torch.library.opcheck(torch.ops.nexttransformer.materialize.default, (x,))
    torch.library.opcheck(torch.ops.nexttransformer.materialize.default, (torch.randn(3, 4).t(),))


def test_eager_code_copies_nothing() -> None:
    x = torch.randn(4)
    assert materialize(x) is x
