from unisono.placement import one_rank_per_node, place
from unisono.schedules import find
from unisono.schedules.pipeline import pipeline
from unisono.schedules.schedule import Action
from unisono.view.schedule import timed_messages


def test_each_rank_communicates_with_two_neighbours_in_four_rounds() -> None:
    for rank in range(1, 8):
        (lane,) = pipeline(rank, 9).lanes
        assert [len(transfers) for transfers in lane] == [1, 1, 1, 1]
        assert {transfer.peer for transfers in lane for transfer in transfers} == {rank - 1, rank + 1}
    assert [len(pipeline(rank, 9).lanes[0]) for rank in (0, 8)] == [2, 2]


def test_reduction_and_broadcast_steps() -> None:
    messages = timed_messages([pipeline(rank, 5) for rank in range(5)])
    assert [(m.step, m.sender, m.receiver) for m in messages if m.action is Action.ADD] == [
        (0, 4, 3),
        (1, 3, 2),
        (2, 2, 1),
        (3, 1, 0),
    ]
    assert [(m.step, m.sender, m.receiver) for m in messages if m.action is Action.RECEIVE] == [
        (4, 0, 1),
        (5, 1, 2),
        (6, 2, 3),
        (7, 3, 4),
    ]


def test_it_enters_each_node_once() -> None:
    placement = place([0, 1, 0, 1, 0, 1])
    algorithm = find("pipeline", placement).allreduce
    crossings = [
        (m.sender, m.receiver)
        for m in timed_messages([algorithm(rank, 6) for rank in range(6)])
        if placement.node_of(m.sender) != placement.node_of(m.receiver)
    ]
    assert crossings == [(1, 4), (4, 1)]


def test_the_broadcast_is_its_second_half() -> None:
    family = find("pipeline", one_rank_per_node(6))
    messages = timed_messages([family.allreduce(rank, 6) for rank in range(6)])
    half = timed_messages([family.broadcast(rank, 6) for rank in range(6)])
    assert half == [m._replace(step=m.step - 5) for m in messages if m.action is Action.RECEIVE]
