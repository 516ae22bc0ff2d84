from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules.direct import direct, reduce_scatter
from unisono.schedules.numbering import locality_order, renumber, round_robin
from unisono.schedules.verify import Goal, verify


def test_orders() -> None:
    assert locality_order(place([0, 1, 2, 3], [0, 1, 0, 1])) == (0, 2, 1, 3)
    assert round_robin(regular(2, 4, 1)) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert round_robin(regular(2, 2, 2)) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert round_robin(one_rank_per_node(5)) == locality_order(one_rank_per_node(5)) == (0, 1, 2, 3, 4)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_the_order_of_locality_is_by_supernode_then_node(nodes: list[int], switches: list[int]) -> None:
    placement = place(nodes, [switches[node] for node in nodes])
    ranks = sorted(range(len(nodes)), key=lambda rank: (placement.supernode_of(rank), placement.node_of(rank)))
    assert locality_order(placement) == tuple(ranks)


def test_a_renumbered_algorithm_reaches_the_same_goal() -> None:
    verify(renumber(direct, (2, 0, 3, 1)), 4)
    verify(renumber(reduce_scatter, (2, 0, 3, 1), chunks_too=True), 4, Goal.REDUCE_SCATTER)
    assert renumber(direct, range(4)) is direct
