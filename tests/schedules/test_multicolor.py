from itertools import combinations

import pytest

from unisono.placement import regular
from unisono.schedules import find
from unisono.schedules.multicolor import max_fitting_colors, multicolor
from unisono.schedules.schedule import Action
from unisono.view.schedule import timed_messages


def parents(most: int, ranks: int) -> list[set[int]]:
    """For each color the ranks that sum from others."""
    programs = [multicolor(most)(rank, ranks) for rank in range(ranks)]
    return [
        {rank for rank, p in enumerate(programs) for turn in p.lanes[color] for t in turn if t.action is Action.ADD}
        for color in range(programs[0].chunks)
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8])
def test_no_rank_has_children_in_two_trees(most: int) -> None:
    for ranks in range(1, 34):
        for first, second in combinations(parents(most, ranks), 2):
            assert not first & second, (ranks, first, second)


def test_as_many_colors_as_fit() -> None:
    assert [max_fitting_colors(4, ranks) for ranks in range(1, 14)] == [1, 2, 3, 4, 4, 3, 3, 4, 4, 3, 2, 4, 4]
    assert [max_fitting_colors(8, ranks) for ranks in (8, 9, 10, 16, 17)] == [8, 8, 5, 8, 8]
    assert all(max_fitting_colors(2, ranks) == 2 for ranks in range(2, 99))


def test_the_trees_of_dimd_figure_2() -> None:
    assert parents(4, 8) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    (root, inner, leaf) = (multicolor(4)(rank, 8).lanes[0] for rank in (0, 1, 7))
    assert [[t.peer for t in turn] for turn in root] == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert [[t.peer for t in turn] for turn in inner] == [[5, 6, 7], [0], [0], [5, 6, 7]]
    assert [[t.peer for t in turn] for turn in leaf] == [[1], [1]]


@pytest.mark.parametrize("ranks", [2, 5, 8, 16, 33])
def test_no_rank_sends_more_than_twice_the_payload(ranks: int) -> None:
    programs = [multicolor(4)(rank, ranks) for rank in range(ranks)]
    messages = timed_messages(programs)
    for rank in range(ranks):
        assert sum(m.sender == rank for m in messages) <= 2 * programs[0].chunks


def test_ranks_with_children_are_near_each_other() -> None:
    placement = regular(2, 2, 2)
    algorithm = find("multicolor", placement).allreduce
    for m in timed_messages([algorithm(rank, 8) for rank in range(8)]):
        if m.action is Action.ADD and m.step == 1:
            assert placement.node_of(m.sender) == placement.node_of(m.receiver)
