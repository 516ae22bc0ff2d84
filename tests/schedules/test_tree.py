import pytest

from unisono.placement import one_rank_per_node, regular
from unisono.schedules import find
from unisono.schedules.schedule import Action
from unisono.schedules.tree import tree
from unisono.view.schedule import timed_messages


@pytest.mark.parametrize("ranks", range(1, 34))
def test_few_messages_and_few_steps(ranks: int) -> None:
    messages = timed_messages([tree(rank, ranks) for rank in range(ranks)])
    assert len(messages) == 2 * (ranks - 1)
    deepest = max(rank.bit_count() for rank in range(ranks))
    assert len({m.step for m in messages}) == 2 * deepest <= 2 * (ranks - 1).bit_length()


def test_a_parent_sums_from_all_its_children_in_one_round_and_serves_the_largest_subtree_first() -> None:
    for rank, children in ((0, [8, 4, 2, 1]), (8, [12, 10, 9]), (12, [14, 13]), (4, [6, 5]), (7, [])):
        (lane,) = tree(rank, 16).lanes
        for action in (Action.ADD, Action.SEND):
            fans = [[t.peer for t in turn] for turn in lane if turn[0].action is action and turn[0].peer > rank]
            assert fans == ([children] if children else [])


def test_two_messages_cross_each_node_boundary() -> None:
    placement = regular(2, 2, 4)
    algorithm = find("tree", placement).allreduce
    messages = timed_messages([algorithm(rank, 16) for rank in range(16)])
    assert sum(placement.node_of(m.sender) != placement.node_of(m.receiver) for m in messages) == 2 * (4 - 1)
    assert sum(placement.supernode_of(m.sender) != placement.supernode_of(m.receiver) for m in messages) == 2 * (2 - 1)


def test_the_broadcast_is_its_second_half() -> None:
    family = find("tree", one_rank_per_node(11))
    messages = timed_messages([family.allreduce(rank, 11) for rank in range(11)])
    half = timed_messages([family.broadcast(rank, 11) for rank in range(11)])
    assert [m[2:] for m in half] == [m[2:] for m in messages if m.action is Action.RECEIVE]
