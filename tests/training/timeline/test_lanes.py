from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine import OperationSpan
from unisono.step.operations import PACK
from unisono.step.program import Task
from unisono.training.timeline.lanes import LANES, MAIN_THREAD, TimelineSpan, lane_of, lane_order, timeline_span

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
