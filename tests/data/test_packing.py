"""Best-fit packing against the golden plan of the specification and a direct simulation of its rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.data.packing import RowPlan, plan_rows, validation_documents

GOLDEN_LENGTHS = [1 + ((7 * d * d + 3 * d) % 23) for d in range(40)]
GOLDEN_ROWS = {
    0: "2:12 3:4 0:1",
    1: "1:11 5:6",
    2: "8:13 4:4",
    3: "6:17",
    4: "11:7 12:10",
    5: "13:4 14:12 15:1",
    6: "16:1 17:5 10:11",
    7: "19:9 20:8",
    8: "7:17",
    9: "22:5 23:1 24:11",
    10: "25:12 26:4 27:1",
    17: "39:1 32:16",
    18: "18:17",
    19: "21:17",
}


def listed(plan: RowPlan) -> list[list[tuple[int, int]]]:
    """Returns the rows of a plan as lists of (document, tokens)."""
    pieces = list(zip(plan.documents.tolist(), plan.tokens.tolist(), strict=True))
    return [pieces[a:b] for a, b in zip(plan.row_starts[:-1], plan.row_starts[1:], strict=True)]


def simulate(lengths: list[int], capacity: int, buffer_documents: int) -> list[list[tuple[int, int]]]:
    """Follows the five rules of the specification one by one, with plain lists and scans."""
    rest = list(enumerate(lengths))
    buffer: list[tuple[int, int]] = []
    rows, row, free = [], [], capacity
    while True:
        while rest and len(buffer) < buffer_documents:
            buffer.append(rest.pop(0))
        if not buffer:
            return rows
        fitting = [entry for entry in buffer if entry[1] <= free]
        if fitting:
            chosen = min(fitting, key=lambda entry: (-entry[1], entry[0]))
            taken = chosen[1]
        else:
            chosen = min(buffer, key=lambda entry: (entry[1], entry[0]))
            taken = free
        buffer.remove(chosen)
        row.append((chosen[0], taken))
        free -= taken
        if free == 0:
            rows.append(row)
            row, free = [], capacity


def test_golden_plan() -> None:
    assert GOLDEN_LENGTHS[:8] == [1, 11, 12, 4, 10, 7, 18, 20]
    plan = plan_rows(GOLDEN_LENGTHS, capacity=17, buffer_documents=4)
    rows = listed(plan)
    assert len(rows) == plan.num_rows == 20
    for index, text in GOLDEN_ROWS.items():
        assert " ".join(f"{document}:{tokens}" for document, tokens in rows[index]) == text, index
    assert int(plan.tokens.sum()) == 340
    assert sum(GOLDEN_LENGTHS) == 432
    assert plan.num_documents_read == 40
    # Nothing is left over: every document was placed.
    assert sorted({document for row in rows for document, _ in row}) == list(range(40))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 20), st.integers(1, 12))
def test_plan_follows_the_rules(lengths: list[int], capacity: int, buffer_documents: int) -> None:
    plan = plan_rows(lengths, capacity=capacity, buffer_documents=buffer_documents)
    assert listed(plan) == simulate(lengths, capacity, buffer_documents)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 12))
def test_fewer_rows_are_a_prefix_and_read_no_further(lengths: list[int], max_rows: int) -> None:
    whole = plan_rows(lengths, capacity=17, buffer_documents=5)
    read = []
    part = plan_rows((read.append(n) or n for n in lengths), capacity=17, buffer_documents=5, max_rows=max_rows)
    assert listed(part) == listed(whole)[:max_rows]
    assert part.num_documents_read == len(read)
    assert part.is_exhausted == (whole.num_rows < max_rows)


def test_every_row_is_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 5000, size=4000).tolist()
    plan = plan_rows(lengths, capacity=2049, buffer_documents=1000)
    sums = np.add.reduceat(plan.tokens, plan.row_starts[:-1])
    assert (sums == 2049).all()
    assert len(set(plan.documents.tolist())) == len(plan.documents)


def test_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has length 0"):
        plan_rows([3, 0], capacity=4, buffer_documents=2)


def test_validation_documents_are_disjoint_and_complete() -> None:
    curve, final = validation_documents(23, "val_curve"), validation_documents(23, "val_final")
    assert curve.tolist() == [0, 5, 10, 15, 20]
    assert sorted([*curve.tolist(), *final.tolist()]) == list(range(23))
