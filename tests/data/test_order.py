"""Data order against the published vectors."""

import numpy as np
import pytest

from nexttransformer.data import order

A = np.zeros(2049, dtype=np.uint16)
B = np.arange(2049, dtype=np.uint16)
C = np.arange(32_767, 32_767 - 2049, -1).astype(np.uint16)


def test_vectors() -> None:
    a, b, c = order.row_hash(A), order.row_hash(B), order.row_hash(C)
    assert [order.to_hex(value) for value in (a, b, c)] == [
        "315695b82e174379",
        "10620ab39024fe80",
        "a7987cec509bff56",
    ]
    start = order.initial_chain()
    assert order.to_hex(start) == "1fb423b3c47f2ae9"
    first = order.sum_hashes(np.array([a, b], dtype=np.uint64))
    assert order.to_hex(first) == "41b8a06bbe3c41f9"
    chain = order.next_chain(start, 1, first)
    assert order.to_hex(chain) == "0510cd6f18efa155"
    second = order.sum_hashes(np.array([c, c], dtype=np.uint64))
    assert order.to_hex(second) == "4f30f9d8a137feac"
    assert order.to_hex(order.next_chain(chain, 2, second)) == "5ccbbf3c6ad161ef"
    assert list(order.chain_values([first, second], at=[0, 2, 4])) == [
        (0, start),
        (2, order.from_hex("5ccbbf3c6ad161ef")),
    ]


def test_batch_equals_single_rows_for_any_dtype_and_layout() -> None:
    rows = np.stack([A, B, C])
    expected = [order.row_hash(row) for row in rows]
    assert order.row_hashes(rows).tolist() == expected
    assert order.row_hashes(rows.astype(np.int64)).tolist() == expected
    assert order.row_hashes(np.asfortranarray(rows)).tolist() == expected
    assert order.row_hashes(rows).dtype == np.uint64


@pytest.mark.parametrize("text", ["", "1fb423b3c47f2ae", "1FB423B3C47F2AE9", "0x1fb423b3c47f2a", "g" * 16])
def test_hex_is_strict(text: str) -> None:
    with pytest.raises(ValueError):
        order.from_hex(text)
    assert order.from_hex(order.to_hex(2**64 + 5)) == 5
