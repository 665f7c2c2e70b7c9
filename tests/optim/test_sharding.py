"""Owners of Muon units and the rounds in which they are updated."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nexttransformer.optim.muon import unit_cost
from nexttransformer.optim.sharding import ROUND_BYTES, assign_to_ranks, muon_cost, plan_rounds


def dense_full_matrices() -> dict[str, tuple[int, ...]]:
    """The 150 Muon matrices of dense_full: 92 squares, 46 of weight 3, 12 gates."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(23):
        block = f"transformer.h.{layer}"
        for projection in ("c_q", "c_k", "c_v", "c_proj"):
            shapes[f"{block}.attn.{projection}.weight"] = (1536, 1536)
        shapes[f"{block}.mlp.c_fc.weight"] = (6144, 1536)
        shapes[f"{block}.mlp.c_proj.weight"] = (1536, 6144)
        if layer % 2 == 0:
            shapes[f"{block}.attn.ve_gate.weight"] = (12, 12)
    return shapes


@pytest.mark.parametrize(
    ("world_size", "largest_load"), [(1, 230), (2, 115), (4, 58), (8, 29), (16, 15), (32, 8), (64, 4)]
)
def test_published_loads_of_dense_full(world_size, largest_load):
    costs = {name: muon_cost(shape) for name, shape in dense_full_matrices().items()}
    owners = assign_to_ranks(costs, world_size=world_size)
    loads = [sum(costs[name] for name in owners if owners[name] == rank) for rank in range(world_size)]
    # In units of one square matrix; the 12 gates weigh nothing.
    assert max(loads) / unit_cost(1536, 1536) == pytest.approx(largest_load, abs=1e-4)
    assert sum(loads) / unit_cost(1536, 1536) == pytest.approx(230, abs=1e-4)


def test_ties_go_by_name_and_lowest_rank():
    owners = assign_to_ranks({"d": 2, "c": 2, "b": 3, "a": 2, "e": 1}, world_size=3)
    assert owners == {"b": 0, "a": 1, "c": 2, "d": 1, "e": 2}


def test_initial_loads_count():
    assert assign_to_ranks({"a": 1, "b": 1}, world_size=2, initial=[5, 0]) == {"a": 1, "b": 1}


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_rounds_hold_every_matrix_once_within_the_limit(world_size):
    shapes = dense_full_matrices()
    owners = assign_to_ranks({name: muon_cost(shape) for name, shape in shapes.items()}, world_size=world_size)
    rounds = plan_rounds(shapes, owners, world_size=world_size, round_bytes=ROUND_BYTES)
    placed = [(name, rank) for ranks in rounds for rank, stacks in enumerate(ranks) for s in stacks for name in s.names]
    assert sorted(placed) == sorted(owners.items())
    sent = 0
    for ranks in rounds:
        shares = [4 * sum(stack.num_elements for stack in stacks) for stacks in ranks]
        assert max(shares) <= ROUND_BYTES
        sent += world_size * max(shares)
    # What the all-gathers move, padding included, over what there is.
    assert sent / sum(4 * math.prod(shape) for shape in shapes.values()) < 1.17


shape_strategy = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
)


@settings(max_examples=50, deadline=None)
@given(st.lists(shape_strategy, min_size=1, max_size=12), st.integers(1, 5), st.integers(4, 400))
def test_plan_is_complete_for_any_shapes(shape_list, world_size, round_bytes):
    shapes: dict[str, tuple[int, ...]] = {f"p{index}": shape for index, shape in enumerate(shape_list)}
    owners = assign_to_ranks({name: muon_cost(shape) for name, shape in shapes.items()}, world_size=world_size)
    placed = []
    for ranks in plan_rounds(shapes, owners, world_size=world_size, round_bytes=round_bytes):
        for rank, stacks in enumerate(ranks):
            members = [name for stack in stacks for name in stack.names]
            num_bytes = sum(4 * math.prod(shapes[name]) for name in members)
            assert num_bytes <= round_bytes or len(members) == 1
            for stack in stacks:
                assert stack.num_elements == sum(math.prod(shapes[name]) for name in stack.names)
                assert all(shapes[name][-2:] == stack.shape[1:] for name in stack.names)
            placed += [(name, rank) for name in members]
    assert sorted(placed) == sorted(owners.items())


def test_stacked_tensors_keep_their_units_together():
    assert muon_cost((8, 128, 64)) == 8 * unit_cost(128, 64)
    owners = {"experts": 0, "plain": 0}
    ((stacks,),) = plan_rounds(
        {"experts": (4, 128, 64), "plain": (128, 64)}, owners, world_size=1, round_bytes=ROUND_BYTES
    )
    assert stacks[0].names == ("experts", "plain")
    assert stacks[0].num_units == (4, 1) and stacks[0].shape == (5, 128, 64)
