"""Choice of the cut to resume from: pure, from the names of what is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.training.workers.cuts import cuts_to_try, dead_before


def test_the_newest_cut_that_is_whole_goes_first() -> None:
    both = {0, 1}
    assert cuts_to_try({20: both, 30: both, 35: both}, [[20, 30, 35], [20]]) == [20, 35, 30]
    assert cuts_to_try({20: both, 30: both}, [[20, 30], [20, 30]]) == [30, 20]
    assert cuts_to_try({20: both, 30: both}, [[20, 30], [10]]) == [30, 20]  # none: the newest, as it is


def test_a_dead_worker_needs_no_snapshot() -> None:
    assert cuts_to_try({20: {0, 1}, 30: {0}}, [[20, 30], [20]]) == [30, 20]


def test_a_final_centre_needs_no_snapshots() -> None:
    assert cuts_to_try({20: {0, 1}, 30: set()}, [[20], [20]]) == [30, 20]


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 2))), st.lists(st.sets(st.integers(0, 9)), min_size=3))
def test_each_cut_is_tried_once(cuts: dict[int, set[int]], snapshots: list[set[int]]) -> None:
    order = cuts_to_try(cuts, snapshots)
    assert sorted(order) == sorted(cuts)
    whole = [all(cut in snapshots[worker] for worker in cuts[cut]) for cut in order]
    assert whole == sorted(whole, reverse=True)


EVENTS = (
    {"number": 0, "worker": 1},
    {"died": 1, "number": 1},
    {"number": 1, "worker": 0},
    {"died": 2, "number": 2},
    {"number": 2, "worker": 1},
    {"number": 3, "worker": 0},
)


def test_the_dead_are_those_that_have_not_come_back() -> None:
    assert [dead_before(EVENTS, number) for number in range(5)] == [set(), {1}, {1, 2}, {2}, {2}]
