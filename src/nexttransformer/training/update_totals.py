"""The one small reduction of an update: what all ranks must know before any of them steps.

One float64 vector, summed on the device after the backward passes and read on the host once.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nexttransformer.training.distributed import World

_LOW = (1 << 32) - 1
# Counts and hash halves stay exact in float64: 65,536 ranks x 2^32 < 2^53.
_HOST_FIELDS = ("tokens", "rows", "stop", "save", "failure", "hash_low", "hash_high")
_DEVICE_FIELDS = ("nats", "bad_loss", "bad_gradient", "gradient_norm")


@dataclass(frozen=True)
class LocalTotals:
    """What a rank contributes from the host. `rows_hash` is the sum of its rows' hashes modulo 2^64.

    `stop`, `save` and `failure` are votes: a stop request, rank 0's clock, and data that could not be read.
    """

    tokens: int
    rows: int
    rows_hash: int
    stop: bool
    save: bool
    failure: bool


@dataclass(frozen=True)
class UpdateTotals:
    """The sums over all ranks, equal on every rank. `gradient_norm` is rank 0's, of the synchronized gradient."""

    nats: float
    gradient_norm: float
    tokens: int
    rows: int
    rows_hash: int
    num_bad_losses: int
    num_bad_gradients: int
    num_stops: int
    num_saves: int
    num_failures: int

    @property
    def is_finite(self) -> bool:
        """Whether every rank may apply the update."""
        sums = math.isfinite(self.nats) and math.isfinite(self.gradient_norm)
        return sums and not self.num_bad_losses and not self.num_bad_gradients


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the 2-norm over all gradients as a float64 scalar on their device."""
    return torch.nn.utils.get_total_norm(gradients).double()


def reduce_totals(world: World, local: LocalTotals, nats: Tensor, norm: Tensor) -> UpdateTotals:
    """Sums everything over the ranks: one collective and the only wait for the device in an update.

    Args:
        world: all ranks.
        local: this rank's host numbers.
        nats: float64 scalar on the device, this rank's sum of token losses.
        norm: float64 scalar on the device, norm of the synchronized gradient.
    """
    host = torch.tensor(
        [
            local.tokens,
            local.rows,
            local.stop,
            local.save,
            local.failure,
            local.rows_hash & _LOW,
            local.rows_hash >> 32,
        ],
        dtype=torch.float64,
        pin_memory=world.device.type == "cuda",
    ).to(world.device, non_blocking=True)
    # Every rank has the same norm; rank 0's is the one that counts. A non-finite one travels as a vote.
    shown_norm = norm if world.is_main else torch.zeros_like(norm)
    device = torch.stack([nats, (~nats.isfinite()).double(), (~norm.isfinite()).double(), shown_norm])
    values = world.sum_vector(torch.cat([host, device])).tolist()
    by_name = dict(zip((*_HOST_FIELDS, *_DEVICE_FIELDS), values, strict=True))
    return UpdateTotals(
        nats=by_name["nats"],
        gradient_norm=by_name["gradient_norm"],
        tokens=int(by_name["tokens"]),
        rows=int(by_name["rows"]),
        rows_hash=(int(by_name["hash_low"]) + (int(by_name["hash_high"]) << 32)) % (1 << 64),
        num_bad_losses=int(by_name["bad_loss"]),
        num_bad_gradients=int(by_name["bad_gradient"]),
        num_stops=int(by_name["stop"]),
        num_saves=int(by_name["save"]),
        num_failures=int(by_name["failure"]),
    )
