"""Which rows of an update a rank computes, and in which micro-batches. Pure functions of the world size."""

from dataclasses import dataclass


def rank_share(rank: int, world_size: int, num_rows: int) -> range:
    """Returns the rows of one rank: floor(n r / W) ... floor(n (r + 1) / W) - 1. W need not divide n."""
    return range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def rank_rows(world_size: int, num_rows: int) -> list[int]:
    """Returns the number of rows of each rank; they differ by at most one and sum to `num_rows`."""
    return [len(rank_share(rank, world_size, num_rows)) for rank in range(world_size)]


def largest_share(world_size: int, num_rows: int) -> int:
    """Returns the largest number of rows that any rank computes: the most a micro-batch can use."""
    return max(rank_rows(world_size, num_rows))


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a rank cuts its rows of every update.

    Attributes:
        rows: the rank's rows, relative to the update.
        micro_batch: rows of each micro-batch, the same for all (fixed shapes).
        num_micro_batches: passes per update; at least 1.
    """

    rows: range
    micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        """Passes per update."""
        return -(-len(self.rows) // self.micro_batch)

    @property
    def num_padded(self) -> int:
        """Rows of weight 0 that fill the last micro-batch."""
        return self.num_micro_batches * self.micro_batch - len(self.rows)


def plan_micro_batches(rank: int, world_size: int, num_rows: int, micro_batch: int) -> MicroBatchPlan:
    """Returns the plan of one rank; a micro-batch above the largest share is lowered to it.

    Args:
        rank: this rank.
        world_size: number of ranks, 1 to `num_rows`.
        num_rows: rows of an update.
        micro_batch: rows of a micro-batch as asked for.
    """
    return MicroBatchPlan(rank_share(rank, world_size, num_rows), min(micro_batch, largest_share(world_size, num_rows)))
