"""Groups of ranks, for any number of ranks and nodes of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import Placement, one_rank_per_node, place
from unisono.reducer.parameter_parts import holders_of
from unisono.tensor_parallel.groups import model_groups


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Placement]:
    """Size of groups, and ranks on nodes, whose number it divides."""
    size = draw(st.integers(1, 5))
    ranks = size * draw(st.integers(1, 6))
    nodes = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return size, place(nodes, [node // 2 for node in nodes])


@given(cases())
def test_groups_and_the_ranks_that_hold_the_same_part_are_partitions_that_cross(case: tuple[int, Placement]) -> None:
    size, placement = case
    groups = model_groups(placement, size)
    alike = holders_of(groups)
    for partition, length in ((groups, size), (alike, placement.ranks // size)):
        assert sorted(rank for group in partition for rank in group) == list(range(placement.ranks))
        assert {len(group) for group in partition} == {length}
    for group in groups:
        assert [next(part for part, held in enumerate(alike) if rank in held) for rank in group] == list(range(size))


@given(cases())
def test_as_many_groups_as_can_lie_within_a_node(case: tuple[int, Placement]) -> None:
    size, placement = case
    inside = [group for group in model_groups(placement, size) if len({placement.node_of(rank) for rank in group}) == 1]
    assert len(inside) >= sum(len(node) // size for node in placement.nodes)


def test_the_examples() -> None:
    assert model_groups(place([0] * 4), 2) == ((0, 1), (2, 3))
    assert model_groups(place([0] * 4), 4) == ((0, 1, 2, 3),)
    assert model_groups(place(["a", "b", "a", "b"]), 2) == ((0, 2), (1, 3))
    assert model_groups(one_rank_per_node(4), 2) == ((0, 1), (2, 3))
