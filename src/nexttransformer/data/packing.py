"""Documents -> rows: best-fit packing as one pure function, computed once for a whole run.

Only document lengths are needed, so rows are planned before any is written. A plan knows nothing of
ranks, workers or files.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CURVE_EVERY_DOCUMENTS = 5
# A waiting document is one integer: its length above, its reversed order below. So integers sort by
# length, and among equal lengths the earliest document is the largest.
_ORDER_BITS = 40
_LAST_ORDER = (1 << _ORDER_BITS) - 1


@dataclass(frozen=True)
class RowPlan:
    """Which document's first tokens fill which row.

    Attributes:
        documents: int64 [P], index of the document of each piece, in placement order.
        tokens: int32 [P], tokens taken from the start of that document, BOS included.
        row_starts: int64 [R + 1], row r consists of pieces row_starts[r] .. row_starts[r + 1] - 1.
        num_documents_read: documents taken from the stream, whether placed or still waiting.
        is_exhausted: the stream ended before `max_rows` rows were full.
    """

    documents: np.ndarray
    tokens: np.ndarray
    row_starts: np.ndarray
    num_documents_read: int
    is_exhausted: bool

    @property
    def num_rows(self) -> int:
        """Full rows of the plan."""
        return len(self.row_starts) - 1


def plan_rows(lengths: Iterable[int], *, capacity: int, buffer_documents: int, max_rows: int | None = None) -> RowPlan:
    """Plans best-fit rows over a stream of documents.

    Before every placement the buffer is refilled to exactly `buffer_documents`. The longest document
    that fits is placed; if none fits, the shortest is cut to the free space and its rest dropped. Ties
    go to the earliest document. An unfinished last row is dropped.

    Args:
        lengths: tokens of each document in order, BOS included; read no further than needed.
        capacity: tokens of a row (context + 1).
        buffer_documents: documents to choose from.
        max_rows: stop after this many rows; None: until the stream ends.

    Returns:
        The plan; the rows of a smaller `max_rows` are a prefix of those of a larger one.

    Raises:
        ValueError: if a length is below 1.
    """
    stream = iter(lengths)
    waiting: list[int] = []
    documents, tokens, row_starts = array("q"), array("i"), array("q", [0])
    num_read, free, num_missing = 0, capacity, buffer_documents
    while max_rows is None or len(row_starts) <= max_rows:
        while num_missing:
            length = next(stream, None)
            if length is None:
                # The stream has ended: the buffer is not refilled from here on.
                break
            if length < 1:
                raise ValueError(f"document {num_read} has length {length}: expected at least 1")
            insort(waiting, (length << _ORDER_BITS) | (_LAST_ORDER - num_read))
            num_read += 1
            num_missing -= 1
        if not waiting:
            break
        place = bisect_left(waiting, (free + 1) << _ORDER_BITS) - 1
        if place >= 0:
            taken = waiting[place] >> _ORDER_BITS
        else:
            # Nothing fits: the first of the shortest, which is the last integer of that length.
            place = bisect_left(waiting, ((waiting[0] >> _ORDER_BITS) + 1) << _ORDER_BITS) - 1
            taken = free
        documents.append(_LAST_ORDER - (waiting.pop(place) & _LAST_ORDER))
        tokens.append(taken)
        num_missing += 1
        free -= taken
        if not free:
            row_starts.append(len(documents))
            free = capacity
    num_pieces = row_starts[-1]
    return RowPlan(
        documents=np.frombuffer(documents, dtype=np.int64)[:num_pieces] if num_pieces else np.zeros(0, np.int64),
        tokens=np.frombuffer(tokens, dtype=np.int32)[:num_pieces] if num_pieces else np.zeros(0, np.int32),
        row_starts=np.frombuffer(row_starts, dtype=np.int64),
        num_documents_read=num_read,
        is_exhausted=max_rows is None or len(row_starts) <= max_rows,
    )


def validation_documents(num_documents: int, split: str) -> np.ndarray:
    """Returns the indices (int64) of the validation documents that belong to a split.

    Document j (from 0, over all validation shards) goes to `val_curve` if j mod 5 = 0, else to
    `val_final`.
    """
    index = np.arange(num_documents, dtype=np.int64)
    is_curve = index % CURVE_EVERY_DOCUMENTS == 0
    if split == "val_curve":
        return index[is_curve]
    assert split == "val_final", split
    return index[~is_curve]
