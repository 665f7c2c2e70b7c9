"""Schedules against the table and checksums of the specification."""

import dataclasses
import math

import pytest

from nexttransformer.optim.groups import ParameterGroup
from nexttransformer.optim.schedule import (
    learning_rate_multiplier,
    muon_momentum,
    muon_weight_decay,
    scheduled_rates,
    warmdown_length,
)
from nexttransformer.protocol import FORMAL_V1, PROTOCOLS

U = 46_875
# update, learning-rate multiplier, Muon learning rate, momentum, weight decay: base_model.md, section 6.
GOLDEN = [
    (0, 0.025, 0.000707107, 0.85, 0.0106439787),
    (1, 0.05, 0.001414214, 0.8503, 0.0106439787),
    (39, 1, 0.028284271, 0.8617, 0.0106439605),
    (40, 1, 0.028284271, 0.862, 0.0106439596),
    (400, 1, 0.028284271, 0.97, 0.0106420664),
    (16_406, 1, 0.028284271, 0.97, 0.00773820142),
    (16_407, 0.999968821, 0.028283389, 0.969997703, 0.00773788361),
    (31_640, 0.525015590, 0.014849683, 0.935001149, 0.00254144764),
    (46_874, 0.050031179, 0.001415095, 0.900002297, 1.19525668e-11),
]


@pytest.mark.parametrize(("update", "multiplier", "muon_rate", "momentum", "decay"), GOLDEN)
def test_golden_table(update, multiplier, muon_rate, momentum, decay):
    (matrix, *_) = FORMAL_V1.groups
    rates = scheduled_rates(update, [ParameterGroup(matrix, ("w",), 1)], num_updates=U, protocol=FORMAL_V1)
    assert learning_rate_multiplier(update, num_updates=U, protocol=FORMAL_V1) == pytest.approx(multiplier, abs=5e-10)
    assert rates.learning_rates == (pytest.approx(muon_rate, abs=5e-10),)
    assert rates.muon_momentum == pytest.approx(momentum, abs=5e-10)
    # The last value is a difference of nearly equal numbers: nine digits need 1 + cos to the last bit.
    assert rates.muon_weight_decay == pytest.approx(decay, rel=5e-6 if decay < 1e-10 else 5e-9)


def test_checksums_over_the_whole_run():
    def total(function) -> float:
        return math.fsum(function(update, num_updates=U, protocol=FORMAL_V1) for update in range(U))

    assert total(learning_rate_multiplier) == pytest.approx(32_383.2, abs=1e-6)
    assert total(muon_momentum) == pytest.approx(44_378.31, abs=1e-6)
    decay = muon_weight_decay(0, num_updates=U, protocol=FORMAL_V1)
    assert total(muon_weight_decay) == pytest.approx(23_438 * decay, rel=1e-12)
    assert total(muon_weight_decay) == pytest.approx(249.473573, abs=1e-6)


def test_first_reduced_update_and_end():
    rates = [learning_rate_multiplier(update, num_updates=U, protocol=FORMAL_V1) for update in range(U)]
    assert U - warmdown_length(U, FORMAL_V1) == 16_406
    assert next(update for update in range(40, U) if rates[update] < 1) == 16_407
    assert min(rates[40:]) == rates[-1] > 0.05


@pytest.mark.parametrize(("num_updates", "length"), [(10, 6), (30, 20), (46_875, 30_469), (1, 1), (50, 32)])
def test_warmdown_length_rounds_half_to_even(num_updates, length):
    assert warmdown_length(num_updates, FORMAL_V1) == length


def test_warm_up_wins_over_warm_down_in_short_runs():
    for num_updates in (10, 30):
        rates = [learning_rate_multiplier(u, num_updates=num_updates, protocol=FORMAL_V1) for u in range(num_updates)]
        assert rates == pytest.approx([(u + 1) / 40 for u in range(num_updates)], abs=1e-15)
    # 60 updates: warm-down length 39, anchored at 21, hidden by the warm-up until update 40.
    assert learning_rate_multiplier(39, num_updates=60, protocol=FORMAL_V1) == 1
    assert learning_rate_multiplier(40, num_updates=60, protocol=FORMAL_V1) == pytest.approx(0.05 + 0.95 * 20 / 39)
    momenta = [muon_momentum(u, num_updates=30, protocol=FORMAL_V1) for u in range(30)]
    assert momenta == pytest.approx([0.85 + 0.12 * u / 400 for u in range(30)], abs=1e-15)
    # 1000 updates: warm-down from 350, hidden until 400.
    assert muon_momentum(399, num_updates=1000, protocol=FORMAL_V1) == pytest.approx(0.85 + 0.12 * 399 / 400)
    assert muon_momentum(400, num_updates=1000, protocol=FORMAL_V1) == pytest.approx(0.97 - 0.07 * 50 / 650)


def test_short_warmups_of_the_test_protocol():
    protocol = PROTOCOLS["test-v1"]
    rates = [learning_rate_multiplier(u, num_updates=20, protocol=protocol) for u in range(20)]
    # Warm-up 4, warm-down 13 from update 7.
    assert rates[:8] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates[8] == pytest.approx(0.05 + 0.95 * 12 / 13)
    assert rates[19] == pytest.approx(0.05 + 0.95 / 13)


def test_schedules_depend_on_the_protocol_only():
    protocol = dataclasses.replace(FORMAL_V1, warmdown_fraction=0.5, final_learning_rate_fraction=0.0)
    assert learning_rate_multiplier(99, num_updates=100, protocol=protocol) == pytest.approx(1 / 50)


@pytest.mark.parametrize("update", [-1, 20])
@pytest.mark.parametrize("function", [learning_rate_multiplier, muon_momentum, muon_weight_decay])
def test_update_outside_the_run(function, update):
    with pytest.raises(ValueError, match="expected 0 to 19"):
        function(update, num_updates=20, protocol=FORMAL_V1)
