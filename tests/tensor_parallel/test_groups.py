"""Groups of ranks, for any number of ranks and nodes of any size."""

from __future__ import annotations

from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.tensor_parallel.groups import model_groups, within_nodes


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Placement]:
    """Sizes of groups, and ranks on nodes, whose number their multiple divides."""
    sizes = draw(st.lists(st.sampled_from([2, 3, 4]), max_size=3))
    ranks = lcm(*sizes) * draw(st.integers(1, 3))
    nodes = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return sizes, place(nodes, [node // 2 for node in nodes])


@given(cases())
def test_groups_are_consistent(case: tuple[list[int], Placement]) -> None:
    sizes, placement = case
    groups, everyone = model_groups(sizes, placement), list(range(placement.ranks))
    for size in sizes:
        model, holders = groups.model(size), groups.holders(size)
        for partition, length in ((model, size), (holders, placement.ranks // size)):
            assert sorted(rank for group in partition for rank in group) == everyone
            assert {len(group) for group in partition} == {length}
        assert all(any(set(group) <= set(sharing) for sharing in groups.sharing) for group in model)
        for group in model:
            assert [next(part for part, held in enumerate(holders) if rank in held) for rank in group] == list(
                range(size)
            )
    data = groups.data()
    assert sorted(rank for group in data for rank in group) == everyone
    for number, sharing in enumerate(groups.sharing):
        assert {group.index(rank) for group in data for rank in sharing if rank in group} == {number}


@given(cases())
def test_as_many_groups_as_can_lie_within_a_node(case: tuple[list[int], Placement]) -> None:
    sizes, placement = case
    size = lcm(*sizes)
    inside = [group for group in within_nodes(placement, size) if len({placement.node_of(rank) for rank in group}) == 1]
    assert len(inside) >= sum(len(node) // size for node in placement.nodes)


def test_the_examples() -> None:
    one_node = model_groups([2, 4], place([0] * 4))
    assert (one_node.sharing, one_node.model(2), one_node.model(4)) == (
        ((0, 1, 2, 3),),
        ((0, 1), (2, 3)),
        ((0, 1, 2, 3),),
    )
    nodes = model_groups([2], regular(1, 2, 2))
    assert (nodes.sharing, nodes.holders(2), nodes.data()) == (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 2), (1, 3)))
    assert within_nodes(place(["a", "b", "a", "b"]), 2) == ((0, 2), (1, 3))
    assert within_nodes(one_rank_per_node(4), 2) == ((0, 1), (2, 3))
    assert model_groups([], one_rank_per_node(3)).data() == ((0, 1, 2),)
