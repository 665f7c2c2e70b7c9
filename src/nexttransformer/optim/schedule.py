"""Learning rate, Muon momentum and Muon weight decay as pure functions of the update index.

`update` counts from 0 and is the update about to be made; nothing here depends on micro-batches,
ranks or attempts, so a resumed run needs no schedule state. The warm-down is anchored at update
num_updates - warmdown_length, where the multiplier still equals 1. In short runs, where a warm-up
overlaps the warm-down, the warm-up wins.
"""

import math
from dataclasses import dataclass

from nexttransformer.optim.groups import ParameterGroup
from nexttransformer.protocol import Protocol


@dataclass(frozen=True)
class Rates:
    """What one update uses.

    Attributes:
        update: update index, from 0.
        learning_rates: scheduled rate of each group, in group order.
        muon_momentum: momentum of Muon.
        muon_weight_decay: weight decay of Muon, before the learning rate multiplies it.
    """

    update: int
    learning_rates: tuple[float, ...]
    muon_momentum: float
    muon_weight_decay: float


def scheduled_rates(update: int, groups: list[ParameterGroup], *, num_updates: int, protocol: Protocol) -> Rates:
    """Returns the rates of one update.

    Args:
        update: update about to be made, from 0.
        groups: groups of the run, in order.
        num_updates: updates of the whole run.
        protocol: supplies the schedules.

    Raises:
        ValueError: if `update` is not an update of this run.
    """
    multiplier = learning_rate_multiplier(update, num_updates=num_updates, protocol=protocol)
    return Rates(
        update=update,
        learning_rates=tuple(group.settings.learning_rate * multiplier for group in groups),
        muon_momentum=muon_momentum(update, num_updates=num_updates, protocol=protocol),
        muon_weight_decay=muon_weight_decay(update, num_updates=num_updates, protocol=protocol),
    )


def warmdown_length(num_updates: int, protocol: Protocol) -> int:
    """Returns the length of the warm-down in updates, rounded half to even.

    Args:
        num_updates: updates of the whole run.
        protocol: supplies the fraction.
    """
    return round(protocol.warmdown_fraction * num_updates)


def learning_rate_multiplier(update: int, *, num_updates: int, protocol: Protocol) -> float:
    """Returns the factor on every group's learning rate, in (0, 1].

    Args:
        update: update about to be made, from 0.
        num_updates: updates of the whole run.
        protocol: supplies warm-up, warm-down and final fraction.

    Raises:
        ValueError: if `update` is not an update of this run.
    """
    _check_update(update, num_updates)
    if update < protocol.warmup_updates:
        return (update + 1) / protocol.warmup_updates
    length = warmdown_length(num_updates, protocol)
    if update <= num_updates - length:
        return 1.0
    final = protocol.final_learning_rate_fraction
    return final + (1 - final) * (num_updates - update) / length


def muon_momentum(update: int, *, num_updates: int, protocol: Protocol) -> float:
    """Returns Muon's momentum of this update.

    Args:
        update: update about to be made, from 0.
        num_updates: updates of the whole run.
        protocol: supplies start, peak, end and warm-up.

    Raises:
        ValueError: if `update` is not an update of this run.
    """
    _check_update(update, num_updates)
    start, peak, end = protocol.momentum_start, protocol.momentum_peak, protocol.momentum_end
    if update < protocol.momentum_warmup_updates:
        return start + (peak - start) * update / protocol.momentum_warmup_updates
    length = warmdown_length(num_updates, protocol)
    first = num_updates - length
    if update < first:
        return peak
    return peak - (peak - end) * (update - first) / length


def muon_weight_decay(update: int, *, num_updates: int, protocol: Protocol) -> float:
    """Returns Muon's weight decay of this update, before the learning rate multiplies it.

    Args:
        update: update about to be made, from 0.
        num_updates: updates of the whole run.
        protocol: its Muon group supplies the decay at update 0.

    Raises:
        ValueError: if `update` is not an update of this run.
    """
    _check_update(update, num_updates)
    (initial,) = {settings.weight_decay for settings in protocol.groups if settings.optimizer == "muon"}
    return initial * 0.5 * (1 + math.cos(math.pi * update / num_updates))


def _check_update(update: int, num_updates: int) -> None:
    if not 0 <= update < num_updates:
        raise ValueError(f"update {update}: expected 0 to {num_updates - 1}.")
