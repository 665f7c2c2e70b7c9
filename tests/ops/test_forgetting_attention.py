"""Forgetting attention: the reference against a loop over pairs, and the CUDA kernel against the reference."""

from functools import partial

import numpy as np
import pytest
import torch

from nexttransformer.ops.attention.naive import attention_naive
from nexttransformer.ops.forgetting_attention import forgetting_attention
from nexttransformer.ops.forgetting_attention.naive import forgetting_attention_naive


def inputs(num_queries: int, num_keys: int, heads: int = 2, dim: int = 8):
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(2, num_queries, heads, dim, generator=generator)
    k, v = (torch.randn(2, num_keys, heads, dim, generator=generator) for _ in range(2))
    log_f = torch.nn.functional.logsigmoid(torch.randn(2, num_keys, heads, generator=generator))
    return q, k, v, log_f


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (13, 13), (3, 13), (1, 13)])
def test_reference_equals_a_loop(num_queries, num_keys, window):
    tensors = inputs(num_queries, num_keys)
    q, k, v, log_f = (x.double().numpy() for x in tensors)
    expected = np.zeros((2, num_queries, 2, 8))
    for b in range(2):
        for h in range(2):
            for i in range(num_queries):
                t = num_keys - num_queries + i
                first = 0 if window is None else max(0, t - window)
                scores = [
                    q[b, i, h] @ k[b, s, h] / np.sqrt(8) + sum(log_f[b, j, h] for j in range(s + 1, t + 1))
                    for s in range(first, t + 1)
                ]
                weights = np.exp(np.array(scores) - max(scores))
                expected[b, i, h] = (weights / weights.sum()) @ v[b, first : t + 1, h]
    actual = forgetting_attention(*tensors, window=window)
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_open_gates_give_plain_attention(window):
    q, k, v, log_f = inputs(9, 9)
    actual = forgetting_attention_naive(q, k, v, torch.zeros_like(log_f), window=window)
    torch.testing.assert_close(actual, attention_naive(q, k, v, window=window), atol=1e-5, rtol=1e-5)


def test_gradients_are_exact():
    q, k, v, log_f = (x.double().requires_grad_() for x in inputs(5, 5, heads=1, dim=3))
    assert torch.autograd.gradcheck(partial(forgetting_attention_naive, window=None), (q, k, v, log_f))


def test_bfloat16_inputs_keep_float32_scores():
    q, k, v, log_f = inputs(64, 64)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    # A long decay: rounding the running sum to bfloat16 would be wrong by whole units.
    steep = log_f - 3
    actual = forgetting_attention(q, k, v, steep)
    expected = forgetting_attention(q.double(), k.double(), v.double(), steep.double())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, atol=0.02, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_tokens", [2048, 77])
def test_kernel_equals_the_reference(num_tokens, window):
    from nexttransformer.ops.forgetting_attention.fused import run_fla

    tensors = [x.cuda() for x in inputs(num_tokens, num_tokens, heads=12, dim=128)]
    leaves = [x.bfloat16().requires_grad_() for x in tensors[:3]] + [tensors[3].requires_grad_()]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    upstream = torch.randn(tensors[2].shape, device="cuda").bfloat16()
    fast = torch.compile(lambda q, k, v, log_f: run_fla(q, k, v, log_f, window), fullgraph=True)(*leaves)
    q, k, v, log_f = exact_leaves
    exact = forgetting_attention_naive(q, k, v, log_f, window=window)
    fast_gradients = torch.autograd.grad(fast, leaves, upstream)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, upstream.double())
    limits = (0.005, 0.01, 0.01, 0.01, 0.02)
    for actual, expected, limit in zip((fast, *fast_gradients), (exact, *exact_gradients), limits, strict=True):
        error = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error.item() < limit
