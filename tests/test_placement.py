from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import Placement, place


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
