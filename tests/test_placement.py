from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import Placement, holders_of, model_groups, one_rank_per_node, place


def test_four_ranks_on_two_nodes() -> None:
    placement = place(["a", "b", "a", "b"])
    assert placement == Placement(((0, 2), (1, 3)))
    assert [placement.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert not placement.one_node
    assert place("xx").one_node
    assert Placement(((0,), (1,)), supernodes=(5, 6)).supernode_of(1) == 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_every_rank_sits_on_one_node(names: list[int]) -> None:
    placement = place(names)
    assert sorted(rank for node in placement.nodes for rank in node) == list(range(len(names)))
    assert placement.ranks == len(names)
    firsts = [node[0] for node in placement.nodes]
    assert firsts == sorted(firsts)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[int, Placement]:
    """Size of groups, and ranks on nodes, whose number it divides."""
    size = draw(st.integers(1, 5))
    ranks = size * draw(st.integers(1, 6))
    nodes = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return size, place(nodes, [node // 2 for node in nodes])


@given(grouped())
def test_groups_and_the_ranks_that_hold_the_same_part_are_partitions_that_cross(case: tuple[int, Placement]) -> None:
    size, placement = case
    groups = model_groups(placement, size)
    alike = holders_of(groups)
    for partition, length in ((groups, size), (alike, placement.ranks // size)):
        assert sorted(rank for group in partition for rank in group) == list(range(placement.ranks))
        assert {len(group) for group in partition} == {length}
    for group in groups:
        assert [next(part for part, held in enumerate(alike) if rank in held) for rank in group] == list(range(size))


@given(grouped())
def test_as_many_groups_as_can_lie_within_a_node(case: tuple[int, Placement]) -> None:
    size, placement = case
    inside = [group for group in model_groups(placement, size) if len({placement.node_of(rank) for rank in group}) == 1]
    assert len(inside) >= sum(len(node) // size for node in placement.nodes)


def test_examples_of_groups() -> None:
    assert model_groups(place([0] * 4), 2) == ((0, 1), (2, 3))
    assert model_groups(place([0] * 4), 4) == ((0, 1, 2, 3),)
    assert model_groups(place(["a", "b", "a", "b"]), 2) == ((0, 2), (1, 3))
    assert model_groups(one_rank_per_node(4), 2) == ((0, 1), (2, 3))
