"""Smoothing and thinning against hand-computed numbers and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexttransformer.reporting.series import half_life, median, rounded, smooth, thin, thin_noisy
from nexttransformer.reporting.svg import ticks

NUMBERS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=300)


def test_smoothing_by_hand():
    # Half-life 1: weights 1/2, 1/4, ... of the newest, the one before, ..., divided by their sum.
    assert smooth([1.0, 2.0, 4.0], 1) == pytest.approx([1.0, (0.25 + 1.0) / 0.75, (0.125 + 0.5 + 2.0) / 0.875])


@given(NUMBERS)
def test_smoothing_stays_inside(values: list[float]):
    result = smooth(values, half_life(len(values)))
    assert result[0] == pytest.approx(values[0])
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in result)


@given(NUMBERS, st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes(values: list[float], limit: int):
    noisy = thin_noisy(values, limit)
    assert noisy == sorted(set(noisy)) and len(noisy) <= max(limit, 4)
    assert {noisy[0], noisy[-1]} == {0, len(values) - 1}
    kept = [values[index] for index in noisy]
    assert (min(kept), max(kept)) == (min(values), max(values))
    even = thin(values, limit)
    assert even[0] == 0 and even[-1] == len(values) - 1 and len(even) <= max(limit, len(even) and 4)


def test_rounding_and_median():
    assert rounded([1234567.0, 0.000123456789]) == [1234570.0, 0.000123457]
    assert median([]) is None and median([3.0, 1.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 140, [0, 20, 40, 60, 80, 100, 120, 140]), (0.66, 0.72, [0.66, 0.67, 0.68, 0.69, 0.7, 0.71, 0.72])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == pytest.approx(expected)
