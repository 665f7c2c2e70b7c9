"""AdamW against the golden values of base_model.md, section 9.4, and torch.optim.AdamW."""

import math

import pytest
import torch

from nexttransformer.optim import adamw
from nexttransformer.optim.adamw import adamw_update
from nexttransformer.protocol import FORMAL_V1, GroupSettings

SETTINGS = {settings.name: settings for settings in FORMAL_V1.groups}
GOLDEN = {
    "embedding": (-0.011869, -0.117277, -0.803742, 0.399640),
    "x0_lambda": (-0.853990, 0.222688, -1.981097, 0.400000),
    "head": (0.486187, -0.246364, 0.075960, 0.399904),
}


def apply(settings: GroupSettings, parameters, gradients, first, second, update: int) -> None:
    assert settings.betas is not None
    adamw_update(
        parameters,
        gradients,
        first,
        second,
        update=update,
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def golden_gradient(t: int) -> torch.Tensor:
    return torch.tensor([math.sin(1 + t), -0.3 * math.cos(t), 1e-6 * (t + 1), 0.0])


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_three_updates(name):
    p = torch.tensor([0.5, -0.25, 0.1, 0.4])
    m, v = torch.zeros(4), torch.zeros(4)
    for t in (1, 2, 3):
        apply(SETTINGS[name], [p], [golden_gradient(t)], [m], [v], update=t - 1)
    torch.testing.assert_close(p, torch.tensor(GOLDEN[name]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["embedding", "x0_lambda", "lambda", "small"])
def test_equals_torch_adamw(name):
    settings = SETTINGS[name]
    assert settings.betas is not None
    generator = torch.Generator().manual_seed(0)
    # In float64, to compare the formula and not the order of roundings.
    shapes = [(7, 5), (3,), ()]
    parameters = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    theirs = [torch.nn.Parameter(p.clone()) for p in parameters]
    reference = torch.optim.AdamW(
        theirs, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    first, second = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    for update in range(20):
        gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        apply(settings, parameters, gradients, first, second, update)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
        for ours, other in zip(parameters, theirs, strict=True):
            torch.testing.assert_close(ours, other.detach(), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_fused_kernel_equals_the_plain_formula():
    generator = torch.Generator().manual_seed(1)
    shapes = [(33, 5), (1,), (64, 64)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for update_function in (adamw._update_plain, adamw._update_fused):
        generator.manual_seed(2)
        p, m, v = (
            [t.clone() for t in start],
            [torch.zeros_like(t) for t in start],
            [torch.zeros_like(t) for t in start],
        )
        for t in range(1, 6):
            gradients = [torch.randn(shape, generator=generator) for shape in shapes]
            update_function(p, gradients, m, v, t, 0.3, (0.8, 0.995), 1e-10, 0.01)
        results.append(p + m + v)
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-5, atol=2e-6)


def test_rows_without_gradient_decay_and_coast():
    settings = SETTINGS["embedding"]
    p, m, v = torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    apply(settings, [p], [torch.zeros(2)], [m], [v], update=10)
    # lr 0.3, wd 0.001: the first element only decays, the second also moves along its momentum.
    assert p[0].item() == pytest.approx(1 - 0.3 * 0.001, rel=1e-7)
    root = math.sqrt(0.995 / (1 - 0.995**11))
    assert p[1].item() == pytest.approx(1 - 0.3 * 0.001 - 0.3 * 0.8 / (1 - 0.8**11) / root, rel=1e-6)
