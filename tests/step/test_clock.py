"""When tasks begin and end: seconds that can be followed by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import StepError
from unisono.step.clock import Clock, TaskSpan, tracks
from unisono.step.costs import Duration
from unisono.step.operations import BARRIER, PACK
from unisono.step.program import Operation, RankGroup, Role, StepProgram, Task, order

ALL = RankGroup((0, 1, 2))
OTHER = RankGroup((0, 1, 2), 1)
ALLREDUCE = Operation("allreduce", None, lambda *_: None, lambda *_: Duration(0.0), Role.COLLECTIVE)


def times(
    programs: dict[int, StepProgram],
    prices: dict[str, Duration],
    threads: dict[str, int] | None = None,
    beside: float = 1.0,
) -> dict[tuple[int, str], tuple[float, float]]:
    clock = Clock(programs, threads or {"a": 1, "b": 1}, lambda _, task: prices[str(task)], beside=beside)
    return {(span.rank, str(span.task)): (span.begin, span.end) for span in clock.run()}


def test_a_lane_runs_what_is_ready_first_and_as_many_as_it_has_threads() -> None:
    work = tuple(Task(PACK, key, "a") for key in (1, 2, 3))
    prices = {"pack 1": Duration(3), "pack 2": Duration(1), "pack 3": Duration(1)}
    assert times({0: work}, prices) == {(0, "pack 1"): (0, 3), (0, "pack 2"): (3, 4), (0, "pack 3"): (4, 5)}
    two = times({0: work}, prices, {"a": 2})
    assert two == {(0, "pack 1"): (0, 3), (0, "pack 2"): (0, 1), (0, "pack 3"): (1, 2)}


def test_a_collective_begins_with_its_last_member() -> None:
    sending = Task(ALLREDUCE, 1, "b", (order(0),), (), ALL)
    programs = {rank: (Task(PACK, rank, "a", (), (order(0),)), sending) for rank in (0, 2)}
    prices = {"pack 0": Duration(1), "pack 2": Duration(5), "allreduce 1": Duration(2)}
    found = times(programs, prices)
    assert found[0, "allreduce 1"] == found[2, "allreduce 1"] == (5, 7)


def test_collectives_at_once_share_the_link_but_not_the_latency() -> None:
    program = (Task(ALLREDUCE, 1, "a", (), (), ALL), Task(ALLREDUCE, 2, "b", (), (), OTHER))
    alike = Duration(3.0, 2.0)  # a latency of 1
    assert times({0: program}, {"allreduce 1": alike, "allreduce 2": alike}) == {
        (0, "allreduce 1"): (0, 3),
        (0, "allreduce 2"): (0, 5),
    }


def test_computing_and_a_collective_at_once_slow_each_other_down() -> None:
    program = (Task(PACK, 1, "a"), Task(ALLREDUCE, 1, "b", (), (), ALL), Task(ALLREDUCE, 2, "b", (), (), ALL))
    prices = {"pack 1": Duration(4), "allreduce 1": Duration(2, 2), "allreduce 2": Duration(0)}
    assert times({0: program}, prices, beside=0.5) == {
        (0, "allreduce 1"): (0, 4),
        (0, "allreduce 2"): (4, 4),
        (0, "pack 1"): (0, 6),
    }
    prices |= {"pack 1": Duration(1), "allreduce 2": Duration(3, 2)}
    found = times({0: program}, prices, {"a": 1, "b": 2}, beside=0.5)  # 2 s for 1, then the link is theirs
    assert found == {(0, "pack 1"): (0, 2), (0, "allreduce 1"): (0, 3), (0, "allreduce 2"): (0, 5)}


def test_the_callback_sees_each_task_in_order_of_time() -> None:
    heard: list[str] = []
    program = (Task(PACK, 1, "a", (), (order(0),)), Task(BARRIER, 2, "b", (), (), ALL), Task(PACK, 3, "a", (order(0),)))
    clock = Clock({0: program}, {"a": 1, "b": 1}, lambda *_: Duration(1), lambda one: heard.append(str(one[0].task)))
    spans: list[TaskSpan] = clock.run()
    assert heard == ["pack 1", "barrier 2", "pack 3"]
    assert [span.number for span in spans] == [0, 1, 2]


def test_deadlocked_ranks_are_named() -> None:
    with pytest.raises(StepError, match="rank 0 in allreduce 1"):
        times({0: (Task(ALLREDUCE, 1, "a", (), (), ALL),), 1: ()}, {"allreduce 1": Duration(1)})


class Span(NamedTuple):
    begin: float
    end: float
    name: str = ""


def test_each_span_goes_to_the_first_free_track() -> None:
    one, two, three = Span(0, 4, "one"), Span(2, 8, "two"), Span(4, 6, "three")
    assert tracks([three, two, one]) == [[one, three], [two]]
    assert tracks([]) == []


spans = st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda pair: Span(pair[0], sum(pair)))


@given(st.lists(spans))
def test_no_two_overlap_and_there_are_no_more_tracks_than_spans_at_once(given: list[Span]) -> None:
    found = tracks(given)
    assert sorted(one for track in found for one in track) == sorted(given)
    assert all(before.end <= after.begin for track in found for before, after in pairwise(track))
    at_once = max((sum(one.begin <= time < one.end for one in given) for time in range(30)), default=0)
    assert len(found) == at_once
