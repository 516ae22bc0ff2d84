"""One suite that every entry of the table of schedules passes."""

from __future__ import annotations

from importlib import import_module

import pytest

from unisono.errors import UsageError
from unisono.schedules import SCHEDULES, find
from unisono.schedules.picture import draw
from unisono.schedules.schedule import Action, Algorithm
from unisono.schedules.verify import Goal, verify

RANKS = range(1, 34)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("goal", Goal)
def test_reaches_its_goal_on_1_to_33_ranks(name: str, goal: Goal) -> None:
    algorithm: Algorithm | None = getattr(find(name), goal.value)
    if algorithm is None:
        pytest.skip(f"{name} offers no {goal.value}")
    for ranks in RANKS:
        verify(algorithm, ranks, goal)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_its_file_is_what_it_does(name: str) -> None:
    documentation = import_module(f"unisono.schedules.{name}").__doc__
    for line in draw(find(name).allreduce, 4, name).splitlines()[1:]:
        assert f"    {line}" in documentation.splitlines()


@pytest.mark.parametrize(("name", "rounds"), [("ring", 14), ("halving", 6), ("direct", 2), ("flat", 1)])
def test_rounds_on_8_ranks(name: str, rounds: int) -> None:
    assert {len(find(name).allreduce(rank, 8).lanes[0]) for rank in range(8)} == {rounds}


@pytest.mark.parametrize("name", ["ring", "halving", "direct"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_each_rank_sends_the_least_possible(name: str, ranks: int) -> None:
    for rank in range(ranks):
        program = find(name).allreduce(rank, ranks)
        sent = sum(t.span for lane in program.lanes for round_ in lane for t in round_ if t.action is Action.SEND)
        assert sent / program.chunks == 2 * (ranks - 1) / ranks


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError, match="'rong'; there are direct, flat, halving, ring"):
        find("rong")
