"""One suite that every entry of the table of schedules passes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from textwrap import indent

import pytest

from unisono.errors import UsageError
from unisono.placement import one_rank_per_node, place, regular
from unisono.schedules import SCHEDULES, find, names
from unisono.schedules.numbering import renumber
from unisono.schedules.schedule import Action
from unisono.schedules.verify import Goal, verify
from unisono.view.schedule import draw, timed_messages

RANKS = range(1, 34)

PLACEMENTS = [
    regular(2, 4, 1),
    regular(3, 2, 2),
    place([0, 1, 0, 1, 0]),
    place([0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1, 1]),
    place([0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 1, 1]),
    place([0, 1, 1, 0, 2, 2, 2, 3, 2, 3], [0, 1, 1, 0, 0, 0, 0, 1, 0, 1]),
    regular(1, 5, 3),
    regular(1, 1, 5),
]

EXAMPLES = {name: regular(1, 2, 2) if SCHEDULES[name].by_node else one_rank_per_node(4) for name in SCHEDULES}
EXAMPLES["supernodes"] = regular(2, 2, 1)
"""Where the 4 ranks of the worked examples sit."""


OFFERED = [(name, goal) for name in names() for goal in Goal if getattr(find(name, one_rank_per_node(2)), goal.value)]


VERIFIED: set[object] = set()
"""Programs that were found right. With one rank per node, schedules by node have those of the one between nodes."""


@pytest.mark.parametrize(("name", "goal"), OFFERED)
def test_reaches_its_goal_on_1_to_33_ranks(name: str, goal: Goal) -> None:
    for ranks in RANKS:
        algorithm = getattr(find(name, one_rank_per_node(ranks)), goal.value)
        programs = goal, tuple(algorithm(rank, ranks) for rank in range(ranks))
        if programs not in VERIFIED:
            verify(algorithm, ranks, goal)
            VERIFIED.add(programs)


@pytest.mark.parametrize("name", names())
def test_reaches_its_goal_on_any_placement(name: str) -> None:
    for placement in PLACEMENTS:
        for goal in Goal:
            if (algorithm := getattr(find(name, placement), goal.value)) is not None:
                verify(algorithm, placement.ranks, goal, placement)


@pytest.mark.parametrize("name", SCHEDULES)
def test_docstring_diagram_equals_the_schedule(name: str) -> None:
    documentation = import_module(f"unisono.schedules.{name}").__doc__
    _, table = draw(find(name, EXAMPLES[name]).allreduce, 4, name).split("\n", 1)
    assert indent(table, "    ") in documentation


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docs_show_the_same(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
    assert draw(find(name, EXAMPLES[name]).allreduce, 4, name) in page
    assert f"(pictures/{name}.svg)" in page


def test_offered_collectives() -> None:
    offers = {goal: {name for name, offered in OFFERED if offered is goal} for goal in Goal}
    assert offers == {
        Goal.ALLREDUCE: set(names()),
        Goal.REDUCE_SCATTER: {"ring", "direct", "circulant"},
        Goal.ALL_GATHER: {"ring", "direct", "circulant"},
        Goal.BROADCAST: {"tree", "tree/binary", "pipeline", "circulant", "split_tree"},
        Goal.REDUCE: {"tree", "tree/binary", "pipeline", "circulant", "split_tree"},
        Goal.ALL_TO_ALL: {"direct", "circulant"},
    }


@pytest.mark.parametrize("name", ["tree", "pipeline"])
def test_a_broadcast_from_any_root_is_a_rotation(name: str) -> None:
    broadcast = find(name, one_rank_per_node(7)).broadcast
    for root in range(7):
        rotated = renumber(broadcast, [(place + root) % 7 for place in range(7)])
        reported = {root: -1}
        for message in timed_messages([rotated(rank, 7) for rank in range(7)]):
            assert reported[message.sender] < message.step
            assert reported.setdefault(message.receiver, message.step) == message.step
        assert len(reported) == 7


@pytest.mark.parametrize(
    ("name", "rounds"), [("ring", 14), ("halving", 6), ("direct", 2), ("flat", 1), ("circulant", 6)]
)
def test_rounds_on_8_ranks(name: str, rounds: int) -> None:
    assert {len(find(name, one_rank_per_node(8)).allreduce(rank, 8).lanes[0]) for rank in range(8)} == {rounds}


@pytest.mark.parametrize("name", ["ring", "halving", "direct", "circulant"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_each_rank_sends_the_least_possible(name: str, ranks: int) -> None:
    for rank in range(ranks):
        program = find(name, one_rank_per_node(ranks)).allreduce(rank, ranks)
        sent = sum(t.span for lane in program.lanes for round_ in lane for t in round_ if t.action is Action.SEND)
        assert sent / program.chunks == 2 * (ranks - 1) / ranks


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UsageError, match=r"'rong'; there are circulant, .*halving, "):
        find("rong", one_rank_per_node(2))
