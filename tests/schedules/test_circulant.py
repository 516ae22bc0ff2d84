from textwrap import indent

import pytest

from unisono.placement import one_rank_per_node
from unisono.schedules import circulant as schedule
from unisono.schedules import find
from unisono.schedules.circulant import all_gather, all_to_all, broadcast, circulant, reduce, reduce_scatter
from unisono.schedules.schedule import Action
from unisono.view.schedule import draw, timed_messages


@pytest.mark.parametrize("ranks", range(1, 34))
def test_rounds_and_bytes(ranks: int) -> None:
    for algorithm, times in ((reduce_scatter, 1), (all_gather, 1), (circulant, 2)):
        for rank in range(ranks):
            (lane,) = algorithm(rank, ranks).lanes
            assert len(lane) == times * (ranks - 1).bit_length()
            sent = sum(t.span for transfers in lane for t in transfers if t.action is Action.SEND)
            assert sent == times * (ranks - 1)


def test_partners_exchange_where_ranks_are_a_power_of_two() -> None:
    for rank in range(8):
        peers = [{t.peer for t in transfers} for transfers in all_gather(rank, 8).lanes[0]]
        assert peers == [{rank ^ 1}, {rank ^ 2}, {rank ^ 4}]


def test_the_root_of_a_broadcast_sends_each_chunk_once_before_the_all_gather() -> None:
    (lane,) = broadcast(0, 8).lanes
    assert [(t.peer, t.chunk, t.span) for t in lane[0]] == [(4, 4, 4), (2, 2, 2), (1, 1, 1)]
    assert lane[1:] == all_gather(0, 8).lanes[0]


def test_a_reduction_is_a_broadcast_backwards() -> None:
    for ranks in range(1, 12):
        for rank in range(ranks):
            (forth,), (back,) = broadcast(rank, ranks).lanes, reduce(rank, ranks).lanes
            ends = [[{(t.peer, t.chunk, t.span) for t in transfers} for transfers in lane] for lane in (forth, back)]
            assert ends[0] == ends[1][::-1]


@pytest.mark.parametrize("ranks", range(1, 34))
def test_an_all_to_all_sends_one_rank_a_round_what_goes_further(ranks: int) -> None:
    for rank in range(ranks):
        (lane,) = all_to_all(rank, ranks).lanes
        sends = [[t for t in transfers if t.action is Action.SEND] for transfers in lane]
        assert [{t.peer for t in transfers} for transfers in sends] == [
            {(rank + (1 << bit)) % ranks} for bit in range((ranks - 1).bit_length())
        ]
        assert sum(map(len, sends)) == sum(distance.bit_count() for distance in range(ranks))


def test_the_all_to_all_of_the_docstring() -> None:
    _, table = draw(all_to_all, 4, "circulant").split("\n", 1)
    assert schedule.__doc__ is not None
    assert indent(table, "    ") in schedule.__doc__


def test_fewer_messages_than_direct() -> None:
    family = find("circulant", one_rank_per_node(8))
    assert len(timed_messages([family.all_gather(rank, 8) for rank in range(8)])) == 24
