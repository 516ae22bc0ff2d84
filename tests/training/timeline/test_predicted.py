from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.choose import layout_of
from unisono.rules import BSP
from unisono.step import operations as op
from unisono.step.clock import TaskSpan
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import steady_step
from unisono.step.program import COMMUNICATION, MAIN, UPDATE, Operation, Task
from unisono.training.timeline.lanes import TimelineSpan
from unisono.training.timeline.predicted import PredictedStep, lay, spans_of

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
