"""The custom operations around our kernels: schema, fake shapes, autograd, ahead-of-time tracing, one graph."""

import pytest
import torch

from nexttransformer.ops.cross_entropy import softcap_cross_entropy
from nexttransformer.ops.lookup_gradient.order import order_tokens
from nexttransformer.ops.relu_squared import relu_squared_mlp
from nexttransformer.ops.rotary_heads import rotary_heads
from tests.ops.interpreted.comparison import draw, leaf

pytestmark = pytest.mark.interpret

H, K, T, F, V = 2, 64, 5, 192, 80
D = H * K
IDS = torch.arange(3 * T).view(3, T) ** 2 % V


def _rotary(has_row: bool) -> tuple:
    generator = torch.Generator().manual_seed(0)
    cos, sin = draw(generator, T, K // 2), draw(generator, T, K // 2)
    row = leaf(draw(generator, 3, T, D)) if has_row else None
    factor = leaf(torch.rand(3, T, H, generator=generator)) if has_row else None
    return leaf(draw(generator, 3, T, 3 * D)), cos, sin, row, factor, H, 1.2


def _convolved(has_row: bool) -> tuple:
    generator = torch.Generator().manual_seed(2)
    row = leaf(draw(generator, 3, T, D)) if has_row else None
    factor = leaf(torch.rand(3, T, H, generator=generator)) if has_row else None
    taps = leaf(torch.rand(3 * D, 4, generator=generator) - 0.5)
    return leaf(draw(generator, 3, T, 3 * D)), taps, row, factor, H


def _stream_write(is_whole: bool) -> tuple:
    generator = torch.Generator().manual_seed(3)
    streams, y, x0 = (leaf(draw(generator, 3, T, *shape)) for shape in ((4, D), (D,), (D,)))
    res, post = (leaf(torch.rand(3, T, *shape, generator=generator)) for shape in ((4, 4), (4,)))
    if not is_whole:
        return streams, y, None, post, None, None, None
    return streams, y, res, post, leaf(torch.tensor(1.1)), leaf(torch.tensor(0.2)), x0


def arguments(name: str) -> tuple:
    """Returns example arguments of a custom operation; those of differentiable ones require gradients."""
    generator = torch.Generator().manual_seed(1)
    x, w1, w2 = draw(generator, T, D), draw(generator, F, D) / 8, draw(generator, D, F) / 8
    a = draw(generator, T, F).square()
    h, head = draw(generator, T, D), draw(generator, V, D) / 8
    if name.startswith(("rotary_heads", "convolved_heads", "stream_write")):
        make = {"rotary": _rotary, "convolved": _convolved, "stream": _stream_write}[name.split("_")[0]]
        given = make(not name.endswith(VARIANTS))
        if "backward" not in name:
            return given
        shapes = [(4, D)] if make is _stream_write else [(H, K)] * 3
        detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
        return *(draw(generator, 3, T, *shape) for shape in shapes), *detached
    return {
        "relu_squared_up": (x, w1),
        "relu_squared_down_backward": (draw(generator, T, D), w2, a),
        "relu_squared_mlp": (leaf(x), leaf(w1), leaf(w2)),
        "relu_squared_mlp_backward": (draw(generator, T, D), x, w1, w2, a),
        "sinkhorn": (leaf(3 * torch.randn(3, T, 4, 4, generator=generator)), 20, 1e-6),
        "lookup_order": (IDS, V),
        "lookup_gradient": (draw(generator, 3, T, D), *order_tokens(IDS, V)),
        "sinkhorn_backward": (*torch.randn(2, 3, T, 4, 4, generator=generator), 20, 1e-6),
        "softcap_cross_entropy": (leaf(h), leaf(head), torch.arange(T), 15.0, True),
        "softcap_cross_entropy_no_gradient": (h, head, torch.arange(T), 15.0, False),
        "softcap_cross_entropy_backward": (torch.rand(T, generator=generator), draw(generator, T, V), h, head),
    }[name]


# What follows the name of an operation that gets fewer arguments here.
VARIANTS = ("_no_row", "_no_mixing", "_no_gradient")
NAMES = (
    "rotary_heads",
    "rotary_heads_no_row",
    "rotary_heads_backward",
    "rotary_heads_backward_no_row",
    "convolved_heads",
    "convolved_heads_no_row",
    "convolved_heads_backward",
    "convolved_heads_backward_no_row",
    "stream_write",
    "stream_write_no_mixing",
    "stream_write_backward",
    "stream_write_backward_no_mixing",
    "sinkhorn",
    "sinkhorn_backward",
    "lookup_order",
    "lookup_gradient",
    "relu_squared_up",
    "relu_squared_down_backward",
    "relu_squared_mlp",
    "relu_squared_mlp_backward",
    "softcap_cross_entropy",
    "softcap_cross_entropy_no_gradient",
    "softcap_cross_entropy_backward",
)


def operation_of(name: str) -> str:
    """Returns the operation of one of `NAMES`."""
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return name


def registered() -> set[str]:
    """Returns our operations that have a kernel of ours, by their names at PyTorch."""
    import nexttransformer.ops.convolved_heads.fused
    import nexttransformer.ops.cross_entropy.fused
    import nexttransformer.ops.lookup_gradient.fused
    import nexttransformer.ops.relu_squared.fused
    import nexttransformer.ops.rotary_heads.fused
    import nexttransformer.ops.sinkhorn.fused
    import nexttransformer.ops.stream_write.fused  # noqa: F401

    names = {name.removeprefix("nexttransformer::") for name in torch._C._dispatch_get_all_op_names()}
    ours = ("rotary_heads", "convolved_heads", "relu_squared", "softcap", "stream_write", "sinkhorn", "lookup")
    return {name for name in names if name.startswith(ours)}


def test_every_operation_is_examined() -> None:
    assert {operation_of(name) for name in NAMES} == registered()


@pytest.mark.parametrize("name", NAMES)
def test_operation(name: str) -> None:
    registered()
    operation = getattr(torch.ops.nexttransformer, operation_of(name))
    torch.library.opcheck(operation.default, arguments(name))


def test_a_block_compiles_to_one_graph() -> None:
    """The three operations in a row, traced as training traces them, give the same values and gradients."""
    generator = torch.Generator().manual_seed(2)
    cos, sin = draw(generator, T, K // 2), draw(generator, T, K // 2)
    given = [draw(generator, 3, T, 3 * D), draw(generator, 3, T, D), torch.rand(3, T, H, generator=generator)]
    given += [draw(generator, F, D) / 8, draw(generator, D, F) / 8, draw(generator, V, D) / 8]
    leaves = [leaf(x) for x in given]

    def loss(qkv, row, factor, w1, w2, head):
        heads = rotary_heads(qkv, cos, sin, num_heads=H, qk_gain=1.2, value_row_BTD=row, value_factor_BTH=factor)
        y = relu_squared_mlp((heads.q_BTHK + heads.k_BTHK * heads.v_BTHK).flatten(2), w1, w2)
        return softcap_cross_entropy(y.flatten(0, 1), head, torch.arange(3 * T), 15.0).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*leaves), loss(*leaves)
    torch.testing.assert_close(actual, expected)
    for one, other in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.equal(one, other)
