"""Residual schemes and attention options on CUDA: compiled bfloat16 against float32 on the CPU."""

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.models.residuals.streams import project_float32
from tests.models.randomize import random_ids, randomize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def error_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double().cpu() - expected.double().cpu()).square().mean()
    return (difference / expected.double().cpu().square().mean()).sqrt().item()


@pytest.mark.parametrize("shape", [(4, 256), (3, 77)])
def test_generator_product_is_float32_accurate(shape):
    torch.manual_seed(0)
    x = torch.randn(*shape, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(32, 1536, device="cuda")).requires_grad_()
    upstream = torch.randn(*shape, 32, device="cuda")
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    fast, exact = project_float32(x, weight), exact_leaves[0] @ exact_leaves[1].t()
    assert fast.dtype == torch.float32
    # Rounding the weight to one bfloat16 term would give 1.6e-3.
    assert error_ratio(fast, exact) < 2e-5
    gradients = torch.autograd.grad(fast, (x, weight), upstream)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, upstream.double())
    for actual, expected in zip(gradients, exact_gradients, strict=True):
        assert error_ratio(actual, expected) < 1e-2


@pytest.mark.parametrize(
    "method",
    ["hc", "mhc", "mhc_lite", "simple_hc", "attnres_block", "mudd", "xsa_learned", "gated_attn_element", "fox"],
)
def test_compiled_model_follows_the_reference(method):
    config = resolve_method(method_files()[method], "demo-v1")
    exact = build_model(config)
    randomize(exact)
    ids = random_ids(config, rows=4)
    exact_nats = exact(ids[:, :-1], ids[:, 1:])
    exact_nats.mean().backward()
    fast = build_model(config, "cuda")
    fast.load_state_dict(exact.state_dict())
    fast.prepare(torch.device("cuda"))
    rows = ids.cuda()
    nats = torch.compile(fast, fullgraph=True)(rows[:, :-1], rows[:, 1:])
    nats.mean().backward()
    assert error_ratio(nats, exact_nats) < 0.02
    gradients = dict(fast.named_parameters())
    for name, parameter in exact.named_parameters():
        expected, actual = parameter.grad, gradients[name].grad
        assert expected is not None and actual is not None, name
        assert actual.isfinite().all(), name
        if parameter.ndim == 2 and parameter.numel() > 4096:
            assert error_ratio(actual, expected) < 0.1, name
