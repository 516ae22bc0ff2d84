from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine import OperationSpan
from unisono.plan.choose import layout_of
from unisono.rules import BSP
from unisono.step import operations as op
from unisono.step.clock import TaskSpan
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket
from unisono.step.operations import PACK
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import steady_step
from unisono.step.program import COMMUNICATION, MAIN, UPDATE, Operation, Task
from unisono.training.timeline.lanes import (
    LANES,
    MAIN_THREAD,
    PredictedStep,
    TimelineSpan,
    lane_of,
    lane_order,
    lay,
    spans_of,
    timeline_span,
)

IN_ORDER = [
    "main",
    "predicted main",
    "predicted main 2",
    "computing 0",
    "communication 0",
    "communication 1",
    "communication 10",
    "predicted communication",
    "update 0",
    "predicted update",
    "server 0",
    "loading",
    "decoding 0",
    "decoding 2",
    "decoding 10",
    "test decoding 0",
    "shuffle",
    "evaluation",
    "checkpoint",
    "a thread",
    "b thread",
]


def test_a_span_says_what_its_task_is() -> None:
    span = OperationSpan("pack 3", "update", "unisono update 0", 5.0, 6.0, Task(PACK, 3, "update"))
    assert timeline_span(span, zero=4.0) == TimelineSpan("pack 3", "update", "update 0", 1.0, 2.0, "pack", 3)
    assert timeline_span(span._replace(about=None)).operation == ""


@pytest.mark.parametrize(
    ("kind", "thread", "lane"),
    [
        ("computing", MAIN_THREAD, "main"),
        ("main", MAIN_THREAD, "main"),
        ("waiting", MAIN_THREAD, "main"),
        ("computing", "unisono computing 0", "computing 0"),
        ("communication", "unisono communication 1", "communication 1"),
        ("update", "unisono update 0", "update 0"),
        ("server", "server 1", "server 1"),
        ("decoding", "decoding_7", "decoding 7"),
        ("decoding", "test decoding_0", "test decoding 0"),
        ("loading", MAIN_THREAD, "loading"),
        ("shuffle", MAIN_THREAD, "shuffle"),
        ("evaluation", MAIN_THREAD, "evaluation"),
        ("checkpoint", MAIN_THREAD, "checkpoint"),
    ],
)
def test_the_lane_of_work(kind: str, thread: str, lane: str) -> None:
    assert lane_of(kind, thread) == lane
    assert lane.rstrip(" 0123456789") in LANES


def test_the_main_thread_has_the_name_that_lanes_go_by() -> None:
    assert threading.main_thread().name == MAIN_THREAD


@given(st.permutations(IN_ORDER))
def test_lanes_have_one_order_whatever_came_first(lanes: list[str]) -> None:
    assert sorted(lanes, key=lane_order) == IN_ORDER


ALLREDUCE = op.allreduce("auto", None)


def played(operation: Operation, key: int, lane: str, begin: float, end: float) -> TaskSpan:
    return TaskSpan(0, 0, Task(operation, key, lane), begin, end)


def shown(name: str, lane: str, begin: float, end: float) -> TimelineSpan:
    return TimelineSpan(name, "predicted", f"predicted {lane}", begin, end)


STEP = [
    shown("forward", "main", 0, 2),
    shown("backward 1", "main", 2, 6),
    shown("allreduce 1", "communication", 4, 9),
]


def test_reading_is_one_span_up_to_a_wait_and_what_takes_no_time_is_left_out() -> None:
    spans = [
        played(op.BEGIN, 0, MAIN, 0, 1),
        played(op.FORWARD, 0, MAIN, 1, 2),
        played(op.FORWARD, 1, MAIN, 2, 2),
        played(op.FORWARD, 2, MAIN, 3, 5),
        played(op.PACK, 1, UPDATE, 5, 5),
        played(op.BACKWARD, 0, MAIN, 5, 7),
        played(op.BACKWARD, 1, MAIN, 7, 9),
        played(ALLREDUCE, 1, COMMUNICATION, 9, 12),
        played(op.UPDATE, 1, UPDATE, 12, 12.5),
    ]
    assert spans_of(spans) == [
        shown("forward", "main", 0, 2),
        shown("forward", "main", 3, 5),
        shown("backward 0", "main", 5, 7),
        shown("backward 1", "main", 7, 9),
        shown("allreduce 1", "communication", 9, 12),
        shown("update 1", "update", 12, 12.5),
    ]


def test_a_step_is_laid_at_the_begin_of_each_measured_one() -> None:
    assert lay([PredictedStep(10, STEP), PredictedStep(20, STEP)]) == [
        shown("forward", "main", 10, 12),
        shown("backward 1", "main", 12, 16),
        shown("forward", "main", 20, 22),
        shown("backward 1", "main", 22, 26),
        shown("allreduce 1", "communication", 14, 19),
        shown("allreduce 1", "communication", 24, 29),
    ]
    assert lay([]) == []


def test_a_step_that_was_faster_than_predicted_has_the_next_prediction_in_a_lane_below() -> None:
    """The measured steps take 4: the second begins while the first, as predicted, is in its backward pass."""
    assert lay([PredictedStep(0, STEP), PredictedStep(4, STEP)]) == [
        shown("forward", "main", 0, 2),
        shown("backward 1", "main", 2, 6),
        shown("forward", "main 2", 4, 6),
        shown("backward 1", "main 2", 6, 10),
        shown("allreduce 1", "communication", 4, 9),
        shown("allreduce 1", "communication 2", 8, 13),
    ]


def test_collectives_at_once_have_a_lane_each_and_a_step_that_overlaps_has_as_many_below() -> None:
    step = [shown("allreduce 1", "communication", 1, 4), shown("allreduce 2", "communication", 2, 5)]
    assert lay([PredictedStep(begin, step) for begin in (0, 3, 6)]) == [
        shown("allreduce 1", "communication", 1, 4),
        shown("allreduce 2", "communication 2", 2, 5),
        shown("allreduce 1", "communication", 7, 10),
        shown("allreduce 2", "communication 2", 8, 11),
        shown("allreduce 1", "communication 3", 4, 7),
        shown("allreduce 2", "communication 4", 5, 8),
    ]


@given(
    st.sampled_from(sorted(OVERLAPS)),
    st.booleans(),
    st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
)
def test_predicted_spans_neither_overlap_nor_begin_before_their_step(
    overlap: str, deferred: bool, begins: list[int]
) -> None:
    computing = Computing((0.0, 2.0, 3.0), (16.0, 12.0, 8.0), 16.0, 0.5)
    layout = layout_of(computing, [Bucket(4, (2,)), Bucket(2, (1,)), Bucket(1, (0,))], deferred)
    step = spans_of(steady_step(BSP(overlap=overlap), Costs(layout, computing, Cost(0.5, 1.0))))
    for begin in begins:
        alone = lay([PredictedStep(begin, step)])
        assert min(one.begin for one in alone) >= begin
    found = lay([PredictedStep(begin, step) for begin in sorted(begins)])
    assert len(found) == len(begins) * len(step)
    for lane in {one.lane for one in found}:
        mine = [one for one in found if one.lane == lane]
        assert all(before.end <= after.begin for before, after in pairwise(mine))
