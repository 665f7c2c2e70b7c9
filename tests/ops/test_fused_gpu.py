"""Fused CUDA operations against their plain references: outputs and every gradient, odd lengths too."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def _ratio(fast: torch.Tensor, exact: torch.Tensor) -> float:
    return ((fast.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("rows", [(2, 256), (3, 77)])
def test_cross_entropy(rows):
    from nexttransformer.ops.cross_entropy import softcap_cross_entropy
    from nexttransformer.ops.cross_entropy.naive import softcap_cross_entropy_naive

    num_tokens = rows[0] * rows[1]
    torch.manual_seed(0)
    h = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.3 * torch.randn(4096, 256, device="cuda")).requires_grad_()
    targets = torch.randint(0, 4096, (num_tokens,), device="cuda")
    upstream = torch.rand(num_tokens, device="cuda")
    exact_h = h.detach().float().requires_grad_()
    rounded = weight.detach().bfloat16().float().requires_grad_()
    exact = softcap_cross_entropy_naive(exact_h, rounded, targets, 15.0)
    fast = softcap_cross_entropy(h, weight, targets, 15.0)
    assert _ratio(fast, exact) < 2e-3
    fast_grads = torch.autograd.grad(fast, (h, weight), upstream)
    exact_grads = torch.autograd.grad(exact, (exact_h, rounded), upstream)
    for one, other in zip(fast_grads, exact_grads, strict=True):
        assert _ratio(one, other) < 1e-2


@pytest.mark.parametrize("width", [1536, 200])
def test_lookup_gradient(width):
    """A third of the tokens have one id; many ids have none. The same bits every time."""
    from nexttransformer.ops.lookup_gradient import lookup, lookup_order

    torch.manual_seed(0)
    ids = torch.randint(0, 4096, (3, 1999), device="cuda")
    ids[torch.rand_like(ids, dtype=torch.float32) < 0.3] = 4095
    table = torch.randn(4096, width, device="cuda", requires_grad=True)
    upstream = torch.randn(3, 1999, width, device="cuda", dtype=torch.bfloat16)
    order = lookup_order(ids, table, torch.bfloat16)
    assert order is not None
    output = lookup(ids, table, torch.bfloat16, order)
    first, second = (torch.autograd.grad(output, table, upstream, retain_graph=True)[0] for _ in range(2))
    exact = torch.zeros_like(table, dtype=torch.float64).index_add_(0, ids.flatten(), upstream.flatten(0, 1).double())
    assert torch.equal(output, table[ids].bfloat16()) and torch.equal(first, second)
    assert _ratio(first, exact) < 1e-5


@pytest.mark.parametrize("num_tokens", [256, 77])
@pytest.mark.parametrize("has_row", [True, False])
def test_rotary_heads(num_tokens, has_row):
    from nexttransformer.models.layers import rope_table
    from nexttransformer.ops.rotary_heads import rotary_heads
    from nexttransformer.ops.rotary_heads.naive import rotary_heads_naive

    torch.manual_seed(0)
    heads, dim = 12, 128
    rope = rope_table(num_tokens, dim, 1e5, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(2, num_tokens, 3 * heads * dim, device="cuda", dtype=torch.bfloat16)
    row = torch.randn(2, num_tokens, heads * dim, device="cuda", dtype=torch.bfloat16) if has_row else None
    factor = torch.rand(2, num_tokens, heads, device="cuda") if has_row else None
    inputs = [x for x in (qkv, row, factor) if x is not None]
    upstream = [torch.randn(2, num_tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def run(dtype, fn):
        leaves = [x.detach().to(dtype if x.dtype == torch.bfloat16 else x.dtype).requires_grad_() for x in inputs]
        extra = leaves[1:] if has_row else [None, None]
        out = fn(leaves[0], *extra)
        return out, torch.autograd.grad(out, leaves, [g.to(out[0].dtype) for g in upstream])

    fast, fast_grads = run(
        torch.bfloat16,
        lambda a, r, f: rotary_heads(a, *rope, num_heads=heads, qk_gain=1.2, value_row_BTD=r, value_factor_BTH=f),
    )
    exact, exact_grads = run(torch.float32, lambda a, r, f: rotary_heads_naive(a, *rope, r, f, heads, 1.2))
    for one, other in zip((*fast, *fast_grads), (*exact, *exact_grads), strict=True):
        assert _ratio(one, other) < 4e-3


@pytest.mark.parametrize("rows", [(2, 256), (3, 77)])
def test_relu_squared(rows):
    from nexttransformer.ops.relu_squared import relu_squared_mlp, relu_squared_mlp_naive

    torch.manual_seed(0)
    x = torch.randn(*rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w1 = (torch.randn(2048, 512, device="cuda") * 512**-0.5).requires_grad_()
    w2 = (torch.randn(512, 2048, device="cuda") * 2048**-0.5).requires_grad_()
    upstream = torch.randn(*rows, 512, device="cuda", dtype=torch.bfloat16)
    exact_inputs = [t.detach().bfloat16().float().requires_grad_() for t in (x, w1, w2)]
    exact = relu_squared_mlp_naive(*exact_inputs)
    fast = relu_squared_mlp(x, w1, w2)
    assert _ratio(fast, exact) < 6e-3
    fast_grads = torch.autograd.grad(fast, (x, w1, w2), upstream)
    exact_grads = torch.autograd.grad(exact, exact_inputs, upstream.float())
    for one, other in zip(fast_grads, exact_grads, strict=True):
        assert _ratio(one, other) < 1e-2


@pytest.mark.parametrize("depth", [64, 520, 1536])
@pytest.mark.parametrize("is_backward", [False, True])
def test_relu_squared_tiles(is_backward, depth):
    """Every candidate tile gives the same bits, at lengths that no tile divides, several tiles a program."""
    from nexttransformer.ops.relu_squared.fused import product
    from nexttransformer.ops.relu_squared.tiles import tiles

    torch.manual_seed(0)
    a = torch.randn(7777, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(depth, 1600, device="cuda", dtype=torch.bfloat16) * depth**-0.5
    h = a.float() @ weight.float()
    aux = torch.rand(7777, 1600, device="cuda").bfloat16() if is_backward else None
    expected = h.relu().square() if aux is None else h * 2 * aux.float().sqrt()
    given = weight if is_backward else weight.t().contiguous()
    made = [product(a, given, 1600, aux, tile) for tile in tiles(is_backward=is_backward)]
    assert _ratio(made[0], expected) < 6e-3
    for tile, other in zip(tiles(is_backward=is_backward), made, strict=True):
        assert torch.equal(other, made[0]), tile


@pytest.mark.parametrize("window", [None, 64])
def test_attention(window):
    from nexttransformer.ops.attention import attention, plan_attention
    from nexttransformer.ops.attention.naive import attention_naive

    torch.manual_seed(0)
    plan = plan_attention(256, window, torch.device("cuda"))
    q, k, v = (torch.randn(2, 256, 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn_like(q)
    exact_inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
    exact = attention_naive(*exact_inputs, window=window)
    fast = torch.compile(attention)(q, k, v, window=window, plan=plan)
    assert _ratio(fast, exact) < 5e-3
    grads = torch.autograd.grad(fast, (q, k, v), upstream)
    for one, other in zip(grads, torch.autograd.grad(exact, exact_inputs, upstream.float()), strict=True):
        assert _ratio(one, other) < 1e-2
    # Continued and odd-length sequences, as evaluation uses them.
    part = attention(q[:, 200:], k, v, window=window, plan=plan)
    assert _ratio(part, exact[:, 200:]) < 5e-3
    short = attention(q[:, :77], k[:, :77], v[:, :77], window=window, plan=plan)
    assert _ratio(short, exact[:, :77]) < 5e-3
