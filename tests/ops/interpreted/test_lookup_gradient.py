"""The gradient of a lookup, interpreted, against sums in float64."""

import pytest
import torch
from torch import Tensor

from nexttransformer.models import build_model
from nexttransformer.ops.in_graph import prepare_compiler
from nexttransformer.ops.lookup_gradient import lookup, lookup_order
from tests.models.tiny import fill_closed_form, golden_tokens, tiny_config
from tests.ops.interpreted.comparison import draw, leaf
from tests.ops.interpreted.conftest import OPERATIONS, is_fused

pytestmark = pytest.mark.interpret

V = 70


def uneven_ids(num_tokens: int, num_rows: int) -> Tensor:
    """Returns ids of which one has three quarters of the tokens; the first and the last occur, many others do not."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, num_rows, (num_tokens,), generator=generator) // 3 * 3
    ids[torch.rand(num_tokens, generator=generator) < 0.75] = 17
    ids[0], ids[-1] = num_rows - 1, 0
    return ids


def expected(ids: Tensor, gradient: Tensor, num_rows: int) -> Tensor:
    """Returns the sums of the gradient's rows by id as a product with a 0/1 matrix, float64."""
    chosen = torch.nn.functional.one_hot(ids.flatten(), num_rows).double()
    return chosen.t() @ gradient.flatten(0, -2).double()


def found(ids: Tensor, gradient: Tensor, num_rows: int = V) -> Tensor:
    """Returns the table's gradient through the public functions."""
    table = leaf(torch.ones(num_rows, gradient.shape[-1]))
    order = lookup_order(ids, table, torch.bfloat16)
    assert order is not None
    (sums,) = torch.autograd.grad(lookup(ids, table, torch.bfloat16, order), table, gradient)
    return sums


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 24), (2, 600), (127, 64), (300, 24), (2500, 64), (1100, 600)])
def test_sums(num_tokens: int, width: int) -> None:
    ids, gradient = uneven_ids(num_tokens, V), draw(torch.Generator().manual_seed(1), num_tokens, width)
    sums, exact = found(ids, gradient), expected(ids, gradient, V)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-4)
    absent = torch.bincount(ids, minlength=V) == 0
    assert absent.any() and (sums[absent] == 0).all()
    assert torch.equal(found(ids, gradient), sums)


@pytest.mark.parametrize("num_many", [127, 128, 256])
@pytest.mark.parametrize("first", [0, 1, 127, 128])
def test_rows_of_about_as_many_tokens_as_the_kernel_calls_many(first: int, num_many: int) -> None:
    """Wherever such a row begins among the sorted tokens, it is written once, and by the right programs."""
    ids = torch.tensor([3] * first + [5] * num_many + [6] * 4)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(first))]
    gradient = draw(torch.Generator().manual_seed(2), len(ids), 40)
    torch.testing.assert_close(found(ids, gradient).double(), expected(ids, gradient, V), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(4, 512, 64, 32, 64, 4, 2), (8, 256, 128, 32, 128, 3, 1), (16, 1024, 32, 64, 32, 1, 4)]
)
def test_other_shapes_of_the_work(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    from nexttransformer.ops.lookup_gradient import fused

    monkeypatch.setattr(fused, "_SHAPE", fused.Shape(*shape))
    ids, gradient = uneven_ids(300, V), draw(torch.Generator().manual_seed(3), 300, 1030)
    torch.testing.assert_close(found(ids, gradient).double(), expected(ids, gradient, V), rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_other_rows() -> None:
    """Values that float32 adds to different sums in different orders; the row begins elsewhere among the sorted."""
    values = torch.tensor([2.0**30, 1.0, -(2.0**30), 1.0])
    gradient = torch.zeros(8, 16, dtype=torch.bfloat16)
    gradient[[1, 2, 4, 7]] = values[:, None].to(torch.bfloat16)
    ids = torch.tensor([9, 4, 4, 9, 4, 9, 9, 4])
    other = torch.tensor([9, 4, 4, 69, 4, 0, 1, 4])
    assert torch.equal(found(ids, gradient)[4], found(other, gradient)[4])


def test_a_gradient_that_is_a_part_of_another_tensor() -> None:
    """As of one of several products side by side; and one expanded from a scalar."""
    ids = uneven_ids(60, V).view(2, 30)
    gradient = draw(torch.Generator().manual_seed(4), 2, 30, 96)[..., 32:64]
    torch.testing.assert_close(found(ids, gradient).double(), expected(ids, gradient, V), rtol=1e-5, atol=1e-4)
    ones = torch.ones((), dtype=torch.bfloat16).expand(2, 30, 32)
    assert torch.equal(found(ids, ones), expected(ids, ones, V).float())


def test_a_nan_stays_in_its_row() -> None:
    ids, gradient = torch.tensor([2, 3, 3, 69]), torch.ones(4, 64, dtype=torch.bfloat16)
    gradient[1] = float("nan")
    assert found(ids, gradient).isnan().any(1).nonzero().tolist() == [[3]]


def test_more_rows_than_sixteen_bits_count() -> None:
    ids = torch.tensor([[40_000, 5, 32_768], [32_767, 40_000, 0]], dtype=torch.int32)
    order = lookup_order(ids, leaf(torch.zeros(40_001, 16)), torch.bfloat16)
    assert order is not None and order.ids_N.tolist() == [0, 5, 32_767, 32_768, 40_000, 40_000]
    assert order.tokens_N.tolist() == [5, 1, 3, 2, 0, 4]


def never(op: str, x: Tensor, *, item_bytes: int = 2) -> bool:
    return False


def test_all_tables_of_a_model_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as training traces it, gradients of every table equal autograd's but for its sums in another order."""
    for op in OPERATIONS:
        monkeypatch.setattr(f"nexttransformer.ops.{op}.is_fused", is_fused if op == "lookup_gradient" else never)
    model = build_model(tiny_config([None] * 3, width=128, heads=1, mlp=128, vocab=V), compute_dtype=torch.bfloat16)
    fill_closed_form(model)
    ids, targets = (x % V for x in golden_tokens(24))
    tables = {name: p for name, p in model.named_parameters() if "wte" in name or "value_embeds" in name}

    def gradients(run) -> dict[str, Tensor]:
        model.zero_grad()
        run(ids, targets).mean().backward()
        return {name: p.grad.clone() for name, p in tables.items() if p.grad is not None}

    prepare_compiler()
    eager = gradients(model)
    compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False))
    monkeypatch.setattr("nexttransformer.ops.lookup_gradient.is_fused", never)
    plain = gradients(model)
    assert len(eager) == len(plain) == len(tables) == 3
    for name, wanted in plain.items():
        torch.testing.assert_close(eager[name], wanted, rtol=1e-4, atol=1e-6)
        assert torch.equal(compiled[name], eager[name])
