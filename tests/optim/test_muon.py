"""Muon against the golden values of base_model.md, section 9.3, and its stated invariants."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nexttransformer.optim import muon
from nexttransformer.optim.muon import muon_update, second_moment_shape, unit_cost

RATE, DECAY, MOMENTA = 0.0282842712, 0.0106439787, (0.85, 0.8503)
TOLERANCE = 2e-6


def table(rows: str) -> Tensor:
    return torch.tensor([[float(value) for value in row.split()] for row in rows.split("/")])


# O and v after the first update, W after the first, v and W after the second.
GOLDEN = {
    (4, 3): {
        "o0": "0.691727 -0.127762 0.505165 / 0.736914 -0.203862 0.406692 / 0.474713 -0.098468 -0.717601 / "
        "0.291344 0.804545 0.133512",
        "v0": "0.015309 0.014100 0.036111 0.034480",
        "w0": "0.247466 0.484258 -0.014287 / -0.519064 -0.208955 0.242481 / 0.126278 -0.189386 -0.417096 / "
        "0.367305 0.445989 0.494852",
        "v1": "0.036823 0.025074 0.063379 0.064724",
        "w1": "0.225966 0.480050 -0.035884 / -0.516025 -0.218045 0.268017 / 0.127781 -0.216101 -0.421208 / "
        "0.390701 0.446608 0.479343",
    },
    (3, 4): {
        "o0": "0.644858 -0.032259 -0.060231 -0.646091 / 0.216531 -0.861339 0.612712 0.357858 / "
        "0.535978 0.083992 -0.609062 0.452222",
        "v0": "0.028732 0.016583 0.021040 0.033645",
        "w0": "0.251830 0.480998 0.003916 -0.460411 / -0.501121 -0.191261 0.238445 0.489092 / "
        "0.126629 -0.195045 -0.423327 -0.503684",
        "v1": "0.060688 0.034628 0.035935 0.058748",
        "w1": "0.231785 0.480593 0.003285 -0.443628 / -0.514387 -0.203620 0.259749 0.478258 / "
        "0.135627 -0.217345 -0.413912 -0.490788",
    },
    (3, 3): {"w0": "0.250025 0.472141 -0.016156 / -0.498445 -0.187694 0.258686 / 0.123402 -0.197086 -0.419519"},
}


def closed_form(shape: tuple[int, int], function: Callable[[int, int], float], dtype: torch.dtype) -> Tensor:
    return torch.tensor([[function(i, j) for j in range(shape[1])] for i in range(shape[0])], dtype=dtype)


def weight(shape: tuple[int, int]) -> Tensor:
    return closed_form(shape, lambda i, j: 0.5 * math.cos(1 + 2 * i + 5 * j + 0.3 * i * j), torch.float32)


def gradient(shape: tuple[int, int], t: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return closed_form(shape, lambda i, j: math.sin(1 + 7 * i + 3 * j + 0.5 * i * j + 2 * t), dtype)


class Units:
    """A batch of matrices with its Muon state."""

    def __init__(self, weights_EMN: Tensor) -> None:
        self.weights = weights_EMN.clone()
        self.momentum = torch.zeros_like(weights_EMN)
        self.second_moments = weights_EMN.new_zeros(second_moment_shape(tuple(weights_EMN.shape)))

    def update(
        self, gradients_EMN: Tensor, *, momentum: float = 0.85, decay: float = DECAY, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        muon_update(
            self.weights,
            gradients_EMN.clone(),
            self.momentum,
            self.second_moments,
            learning_rate=RATE,
            momentum=momentum,
            weight_decay=decay,
            second_beta=0.9,
            eps=1e-10,
            compute_dtype=dtype,
        )
        return self.weights

    def direction(self, gradients_EMN: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """O of one update: with weight 0 the update is -eta O."""
        self.weights.zero_()
        m, n = self.weights.shape[-2:]
        return self.update(gradients_EMN, dtype=dtype) / -(RATE * math.sqrt(max(1, m / n)))


@pytest.mark.parametrize("shape", GOLDEN)
def test_golden_updates(shape):
    golden = GOLDEN[shape]
    units = Units(weight(shape)[None])
    for t in (0, 1):
        units.update(gradient(shape, t)[None], momentum=MOMENTA[t])
        if f"w{t}" in golden:
            torch.testing.assert_close(units.weights[0], table(golden[f"w{t}"]), rtol=0, atol=TOLERANCE)
        if f"v{t}" in golden:
            torch.testing.assert_close(
                units.second_moments.flatten(), table(golden[f"v{t}"])[0], rtol=0, atol=TOLERANCE
            )


@pytest.mark.parametrize("shape", [(4, 3), (3, 4)])
def test_golden_direction_and_mask(shape):
    # In float64, as the table: five steps amplify fp32 rounding about 40 times, and every order of
    # operations leaves 2.5e-6 to 4.1e-6 in O of the 3 x 4 case (1.2e-7 in W, tested above in fp32).
    units = Units(torch.zeros(1, *shape, dtype=torch.float64))
    o = units.direction(gradient(shape, 0, torch.float64)[None], dtype=torch.float64)[0]
    torch.testing.assert_close(o, table(GOLDEN[shape]["o0"]).double(), rtol=0, atol=1e-6)
    if shape == (4, 3):
        mask = (o * weight(shape) >= 0).int().tolist()
        assert mask == [[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_decay_acts_only_where_the_mask_is_set():
    w, g = weight((4, 3))[None], gradient((4, 3), 0)[None]
    difference = Units(w).update(g, decay=0.0) - Units(w).update(g, decay=DECAY)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    expected = RATE * math.sqrt(4 / 3) * DECAY * w * mask
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-7)
    assert difference.abs().max() > 1e-4


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3), (1536, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gradient_only_decays(shape, dtype):
    w = weight(shape)[None]
    units = Units(w)
    eta = RATE * math.sqrt(max(1, shape[0] / shape[1]))
    torch.testing.assert_close(units.update(torch.zeros_like(w), dtype=dtype), w * (1 - eta * DECAY), rtol=1e-6, atol=0)
    assert not units.momentum.any() and not units.second_moments.any()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1e6])
def test_tiny_and_huge_gradients_are_finite(scale):
    units = Units(weight((6, 4))[None])
    for t in range(3):
        assert units.update(gradient((6, 4), t)[None] * scale).isfinite().all()


def test_stacked_tensor_is_independent_units():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 24, 16)
    weights = torch.randn(shape, generator=generator)
    together, alone = Units(weights), [Units(w[None]) for w in weights]
    for _ in range(3):
        gradients = torch.randn(shape, generator=generator)
        # One unit without a gradient must not disturb the others.
        gradients[1] *= 0
        together.update(gradients)
        for unit, g in zip(alone, gradients, strict=True):
            unit.update(g[None])
    torch.testing.assert_close(together.weights, torch.cat([unit.weights for unit in alone]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        together.second_moments, torch.cat([unit.second_moments for unit in alone]), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("shape", [(96, 40), (40, 96), (64, 64), (200, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_the_direction(shape, dtype):
    g = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    o = Units(torch.zeros(2, *shape)).direction(g, dtype=dtype)
    # ||O||_F = sqrt(min(m, n)), so its RMS is 1/sqrt(max(m, n)).
    torch.testing.assert_close(o.norm(dim=(-2, -1)), torch.full((2,), math.sqrt(min(shape))), rtol=1e-5, atol=0)
    if shape[0] >= shape[1]:
        rms_EM = o.square().mean(-1).sqrt()
        torch.testing.assert_close(rms_EM, rms_EM.mean(-1, keepdim=True).expand_as(rms_EM), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(256, 96), (96, 256), (128, 128)])
def test_bf16_products_against_fp32(shape):
    g = torch.randn(1, *shape, generator=torch.Generator().manual_seed(2))
    exact = Units(torch.zeros(1, *shape)).direction(g)
    rounded = Units(torch.zeros(1, *shape)).direction(g, dtype=torch.bfloat16)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.05
    assert abs(rounded.norm() / exact.norm() - 1) < 2e-4


def test_singular_values_after_five_steps():
    g = torch.randn(1, 256, 1024, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(muon.polar_express(muon.bound_norm(muon.equilibrate_rows(g))))
    # Measured range of a Gaussian 256 x 1024: 0.859 to 1.141 (base_model.md, section 5.3).
    assert 0.84 < values.min() < 0.88 and 1.12 < values.max() < 1.16


def test_equilibrated_rows_have_equal_norms_and_keep_the_total():
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(4)) * torch.arange(1.0, 6.0)[:, None]
    norm = x.norm(dim=(-2, -1))
    rows = muon.equilibrate_rows(x).norm(dim=-1)
    torch.testing.assert_close(rows, (norm / math.sqrt(5))[:, None].expand(2, 5))


def test_cost_and_state_shape():
    square = unit_cost(1536, 1536)
    assert unit_cost(6144, 1536) == unit_cost(1536, 6144) == 3 * square
    total = sum(5 * unit_cost(*shape) * count for shape, count in (((1536, 1536), 92), ((6144, 1536), 46)))
    # 2.50e13 FLOPs an update for dense_full.
    assert total == pytest.approx(2.50e13, rel=2e-3)
    assert second_moment_shape((4, 3)) == (4, 1)
    assert second_moment_shape((3, 3)) == (3, 1)
    assert second_moment_shape((5, 3, 4)) == (5, 1, 4)
