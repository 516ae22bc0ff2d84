"""One suite that every entry of the table of schedules passes."""

from __future__ import annotations

from importlib import import_module

import pytest

from unisono.errors import UsageError
from unisono.placement import apart, place, regular
from unisono.schedules import SCHEDULES, find, names
from unisono.schedules.picture import draw
from unisono.schedules.schedule import Action
from unisono.schedules.verify import Goal, verify

RANKS = range(1, 34)

PLACEMENTS = [
    regular(2, 4, 1),
    regular(3, 2, 2),
    place([0, 1, 0, 1, 0]),
    place([0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1, 1]),
    place([0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 1, 1]),
]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("goal", Goal)
def test_reaches_its_goal_on_1_to_33_ranks(name: str, goal: Goal) -> None:
    if getattr(find(name, apart(2)), goal.value) is None:
        pytest.skip(f"{name} offers no {goal.value}")
    for ranks in RANKS:
        verify(getattr(find(name, apart(ranks)), goal.value), ranks, goal)


@pytest.mark.parametrize("name", names())
def test_reaches_its_goal_wherever_ranks_sit(name: str) -> None:
    for placement in PLACEMENTS:
        for goal in Goal:
            if (algorithm := getattr(find(name, placement), goal.value)) is not None:
                verify(algorithm, placement.ranks, goal)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_its_file_is_what_it_does(name: str) -> None:
    documentation = import_module(f"unisono.schedules.{name}").__doc__
    for line in draw(find(name, apart(4)).allreduce, 4, name).splitlines()[1:]:
        assert f"    {line}" in documentation.splitlines()


@pytest.mark.parametrize(("name", "rounds"), [("ring", 14), ("halving", 6), ("direct", 2), ("flat", 1)])
def test_rounds_on_8_ranks(name: str, rounds: int) -> None:
    assert {len(find(name, apart(8)).allreduce(rank, 8).lanes[0]) for rank in range(8)} == {rounds}


@pytest.mark.parametrize("name", ["ring", "halving", "direct"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_each_rank_sends_the_least_possible(name: str, ranks: int) -> None:
    for rank in range(ranks):
        program = find(name, apart(ranks)).allreduce(rank, ranks)
        sent = sum(t.span for lane in program.lanes for round_ in lane for t in round_ if t.action is Action.SEND)
        assert sent / program.chunks == 2 * (ranks - 1) / ranks


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError, match="'rong'; there are direct, flat, halving, "):
        find("rong", apart(2))
