"""Compares tensors with the limits that the kernel self-check applies on a GPU."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nexttransformer.ops.path_check import error_ratio, limit_of


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Returns normal bfloat16 values."""
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a copy that requires a gradient."""
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the gradient of every leaf as d<name>, for these upstream gradients cast to the outputs' dtypes."""
    weights = [g.to(o.dtype) for o, g in zip(outputs, upstream, strict=True)]
    found = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every tensor within the limit of its name: "o" or a gradient such as "dq"."""
    assert actual.keys() == expected.keys()
    ratios = {name: error_ratio(actual[name], expected[name]) for name in expected}
    assert all(actual[name].shape == expected[name].shape for name in expected)
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= limit_of(name)} == {}, ratios
