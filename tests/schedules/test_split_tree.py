from textwrap import indent

import pytest

from unisono.schedules import split_tree as schedule
from unisono.schedules.schedule import Action
from unisono.schedules.split_tree import broadcast, reduce, split_tree
from unisono.view.schedule import draw, timed_messages


@pytest.mark.parametrize("ranks", range(2, 34))
def test_few_messages_and_few_steps(ranks: int) -> None:
    steps = 1 + (ranks - 1).bit_length()
    for algorithm, count in ((broadcast, 2 * ranks - 2), (reduce, 2 * ranks - 1)):
        messages = timed_messages([algorithm(rank, ranks) for rank in range(ranks)])
        assert len(messages) == count
        assert len({message.step for message in messages}) <= steps
        for rank in range(ranks):
            sent = [message for message in messages if message.sender == rank]
            assert len(sent) <= steps


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_an_allreduce_of_a_power_of_two_has_a_round_for_each_step(ranks: int) -> None:
    for rank in range(ranks):
        (lane,) = split_tree(rank, ranks).lanes
        assert len(lane) == ranks.bit_length()
        assert all([transfer.action is Action.SEND for transfer in transfers] == [True, False] for transfers in lane)


def test_the_root_sends_the_other_tree_its_half_first_and_receives_nothing() -> None:
    (lane,) = broadcast(0, 8).lanes
    assert [[(transfer.action, transfer.peer, transfer.chunk) for transfer in transfers] for transfers in lane] == [
        [(Action.SEND, peer, chunk) for peer, chunk in ((1, 1), (4, 0), (2, 0), (1, 0))]
    ]


def test_the_broadcast_of_the_docstring() -> None:
    _, table = draw(broadcast, 4, "split_tree").split("\n", 1)
    assert schedule.__doc__ is not None
    assert indent(table, "    ") in schedule.__doc__
