"""Soft-capped cross-entropy, interpreted, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nexttransformer.ops.cross_entropy import softcap_cross_entropy
from nexttransformer.ops.path_check import error_ratio
from tests.ops.interpreted.comparison import assert_close, draw, gradients, leaf

pytestmark = [
    pytest.mark.interpret,
    # NumPy's words for exp(x) = infinity, which the kernel means to have.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

CAP = 15.0


def expected_nats(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(CAP * torch.tanh(h @ weight.t() / CAP), targets, reduction="none")


def targets_of(num_tokens: int, vocab_size: int) -> Tensor:
    """Returns ids that include the first and the last of the vocabulary."""
    ids = (torch.arange(num_tokens) * 7919) % vocab_size
    ids[-1] = vocab_size - 1
    return ids


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(1, 64), (33, 300), (7, 1024), (5, 8200)])
def test_values_and_gradients(num_tokens: int, vocab_size: int, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    given = {"h": draw(generator, num_tokens, 64), "w": draw(generator, vocab_size, 64) / 2}
    targets, upstream = targets_of(num_tokens, vocab_size), [torch.randn(num_tokens, generator=generator)]
    fast = {"h": leaf(given["h"]), "w": leaf(given["w"], weight_dtype)}
    exact = {name: leaf(x, torch.float64) for name, x in given.items()}
    nats = softcap_cross_entropy(fast["h"], fast["w"], targets, CAP)
    expected = expected_nats(exact["h"], exact["w"], targets)
    assert nats.dtype == torch.float32
    assert_close({"o": nats}, {"o": expected})
    actual = gradients([nats], fast, upstream)
    assert actual["dw"].dtype == weight_dtype
    assert_close(actual, gradients([expected], exact, upstream))
    with torch.no_grad():
        assert torch.equal(softcap_cross_entropy(fast["h"], fast["w"], targets, CAP), nats)


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0, 1e4, 1e30])
def test_logits_near_zero_and_far_beyond_the_cap(scale: float) -> None:
    """The logits are exact, so that nats and dz are those of float64 but for float32 and one rounding to bfloat16."""
    generator = torch.Generator().manual_seed(5)
    logits = draw(generator, 24, 320) * scale
    logits[0] = -logits[0].abs()
    logits[1] = 0
    targets = targets_of(24, 320)
    identity = torch.eye(320, dtype=torch.bfloat16)
    fast, exact = leaf(logits), leaf(logits, torch.float64)
    nats, expected = (
        softcap_cross_entropy(fast, identity, targets, CAP),
        expected_nats(exact, identity.double(), targets),
    )
    torch.testing.assert_close(nats.double(), expected, rtol=2e-6, atol=1e-5)
    (actual,), (wanted,) = torch.autograd.grad(nats.sum(), fast), torch.autograd.grad(expected.sum(), exact)
    assert actual.isfinite().all()
    # Far beyond the cap only 1 - tanh^2 < 1e-6 is left of the gradient, or nothing.
    torch.testing.assert_close(actual.double(), wanted, rtol=2**-8, atol=1e-6)
    if scale <= 40:
        assert error_ratio(actual, wanted) < 3e-3


def test_the_backward_pass_makes_no_second_tensor_of_the_logits_size() -> None:
    shapes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            results = func(*args, **(kwargs or {}))
            # Views, such as a saved tensor's, take no memory.
            if not func.is_view:
                shapes.extend(x.shape for x in tree_leaves(results) if isinstance(x, Tensor))
            return results

    h, weight = leaf(torch.ones(5, 64, dtype=torch.bfloat16)), leaf(torch.ones(80, 64, dtype=torch.bfloat16))
    nats = softcap_cross_entropy(h, weight, torch.arange(5), CAP)
    with Recorder():
        nats.sum().backward()
    assert shapes and (5, 80) not in shapes


def test_a_nan_logit_reaches_the_loss() -> None:
    logits = torch.zeros(2, 64, dtype=torch.bfloat16)
    logits[0, 9] = float("nan")
    nats = softcap_cross_entropy(logits, torch.eye(64, dtype=torch.bfloat16), torch.tensor([3, 3]), CAP)
    # The product with the identity spreads the NaN over its own row only.
    assert nats.isnan().tolist() == [True, False]
