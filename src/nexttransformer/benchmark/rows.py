"""Rows without data: uniform random token ids, for the feed and for validation."""

from typing import Any

import numpy as np

from nexttransformer.protocol import Protocol

# Different rows kept in memory; more rows repeat them.
_POOL_ROWS = 64


class SyntheticRows:
    """Serves both as `training.feed.RowSource` and as `evaluation.bpb.Rows`."""

    def __init__(self, protocol: Protocol, num_rows: int = 0) -> None:
        """Takes the protocol that fixes vocabulary and context, and the rows of a validation split."""
        generator = np.random.default_rng(protocol.seed)
        shape = (_POOL_ROWS, protocol.context_tokens + 1)
        self._pool = generator.integers(0, protocol.vocab_size, shape, dtype=np.uint16)
        self.num_rows = num_rows

    def rows(self, update: int, start: int, stop: int) -> np.ndarray:
        """Returns rows start ... stop - 1 of an update, uint16 [n, T + 1]."""
        return self.read(np.arange(start, stop) + update)

    def read(self, indices: Any) -> np.ndarray:
        """Returns rows by number, uint16 [n, T + 1]."""
        return self._pool[np.asarray(indices) % _POOL_ROWS]
