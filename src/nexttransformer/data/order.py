"""The data order as numbers: a 64-bit hash per row, a sum per update, a chain over updates.

    h(row) = BLAKE2b with 8-byte digest over the row's ids as little-endian uint16
    s(u)   = sum of h over the rows of update u, modulo 2^64
    c(0)   = H("nexttransformer data order 1"),  c(u) = H(c(u-1) || u || s(u))

All integers are read and written little-endian; H is the same BLAKE2b. Here u counts *completed*
updates: s(1) belongs to the first update, which reads stored rows 0, 1, ... The sum does not depend on
ranks, micro-batches or the order inside an update.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

_MODULUS = 1 << 64
_START = b"nexttransformer data order 1"


def row_hash(row: np.ndarray) -> int:
    """Returns h of one row of token ids (any integer dtype, ids below 65,536)."""
    return int.from_bytes(_hash(np.ascontiguousarray(row, dtype="<u2").tobytes()), "little")


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """Returns h of each row of [n, T + 1] ids as uint64 [n]."""
    content = np.ascontiguousarray(rows, dtype="<u2")
    return np.frombuffer(b"".join(_hash(row.data) for row in content), dtype="<u8").astype(np.uint64)


def sum_hashes(hashes: np.ndarray) -> int:
    """Returns the sum of uint64 row hashes modulo 2^64 (rows_hash)."""
    return int(np.sum(hashes, dtype=np.uint64))


def initial_chain() -> int:
    """Returns c(0), the chain before any update."""
    return int.from_bytes(_hash(_START), "little")


def next_chain(chain: int, update: int, rows_hash: int) -> int:
    """Returns c(update) from c(update - 1) and s(update).

    Args:
        chain: c(update - 1).
        update: completed updates once this one is done; 1 for the first.
        rows_hash: s(update), modulo 2^64.
    """
    parts = (chain % _MODULUS, update, rows_hash % _MODULUS)
    return int.from_bytes(_hash(b"".join(part.to_bytes(8, "little") for part in parts)), "little")


def chain_values(rows_hashes: Iterable[int], *, at: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields (u, c(u)) for the updates in `at` that the hashes reach.

    Args:
        rows_hashes: s(1), s(2), ...
        at: completed updates to report; 0 is the start.
    """
    wanted = set(at)
    chain = initial_chain()
    if 0 in wanted:
        yield 0, chain
    for update, rows_hash in enumerate(rows_hashes, start=1):
        chain = next_chain(chain, update, rows_hash)
        if update in wanted:
            yield update, chain


def to_hex(value: int) -> str:
    """Returns the 16 hex digits in which hashes and chains are stored."""
    return f"{value % _MODULUS:016x}"


def from_hex(text: str) -> int:
    """Reads 16 hex digits.

    Raises:
        ValueError: for anything else, upper case included.
    """
    if len(text) != 16 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not 16 lower-case hex digits")
    return int(text, 16)


def _hash(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
