"""Guards of an update: missing gradients, non-finite numbers, loss spikes, recompilations."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from nexttransformer.errors import RunFailure
from nexttransformer.training.compiling import num_graphs

SPIKE_WINDOW = 128
SPIKE_DEVIATIONS = 6.0
_NUM_NAMES = 5


def check_all_have_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises RunFailure naming every parameter that the first backward pass did not reach."""
    missing = [name for name, parameter in parameters.items() if parameter.grad is None]
    if missing:
        raise RunFailure(
            f"No gradient after the first backward pass: {', '.join(missing)}. Every declared parameter must "
            "contribute to the loss. Remove the parameter or use it."
        )


def check_no_gradient_is_zero(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises RunFailure naming parameters whose gradient is zero everywhere; the same on all ranks.

    At initialization many are, a few updates later none: then a gradient was lost on its way, which training would
    survive unnoticed. Compiled graphs that are cut for DDP have done that.
    """
    given = [(name, parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None]
    is_zero = torch.stack([~gradient.any() for _, gradient in given]).tolist()
    names = [name for (name, _), zero in zip(given, is_zero, strict=True) if zero]
    if names:
        more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        raise RunFailure(
            f"The gradient is zero everywhere for {', '.join(names[:_NUM_NAMES])}{more}. Either nothing of the loss "
            "depends on them, or compiled code lost the gradients: compare with a run on one process, and report it."
        )


def nonfinite_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the first names whose gradient holds NaN or Inf (one wait per parameter: failure path only)."""
    bad = (
        name for name, parameter in parameters.items() if parameter.grad is not None and not _is_finite(parameter.grad)
    )
    return [name for name, _ in zip(bad, range(_NUM_NAMES), strict=False)]


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


class SpikeCounter:
    """Counts loss spikes: more than 6 standard deviations above the mean of the last 128 updates.

    Spikes are counted and reported, never acted upon: the number of updates is the protocol.
    """

    def __init__(self, losses: Iterable[float] = (), num_spikes: int = 0) -> None:
        self._losses = list(losses)[-SPIKE_WINDOW:]
        self.num_spikes = num_spikes

    @property
    def losses(self) -> list[float]:
        """The last losses, oldest first, as a checkpoint keeps them."""
        return list(self._losses)

    def add(self, loss: float) -> dict[str, float] | None:
        """Takes the loss of an update; returns mean and standard deviation before it if it is a spike."""
        spike = None
        if len(self._losses) == SPIKE_WINDOW:
            mean = math.fsum(self._losses) / SPIKE_WINDOW
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in self._losses) / SPIKE_WINDOW)
            if loss > mean + SPIKE_DEVIATIONS * deviation:
                self.num_spikes += 1
                spike = {"loss_nats": loss, "mean_nats": mean, "deviation_nats": deviation}
        self._losses = [*self._losses, loss][-SPIKE_WINDOW:]
        return spike


class RecompileCounter:
    """Counts graphs that torch compiled after the warm-up updates: shapes or guards that changed."""

    def __init__(self) -> None:
        self._baseline: int | None = None

    def settle(self) -> None:
        """What is compiled by now is expected (also after an evaluation, which has other shapes)."""
        self._baseline = num_graphs()

    def poll(self) -> int:
        """Returns how many graphs were compiled since the last poll or `settle`; 0 before `settle`."""
        if self._baseline is None:
            return 0
        num_new = num_graphs() - self._baseline
        self._baseline += num_new
        return num_new
