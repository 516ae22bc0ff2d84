"""The player carries out all tasks, in both orders, beside each other, and ends when all of them are over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from unisono.engine.engine import Engine
from unisono.errors import OperationError
from unisono.tensor_parallel.overlap.player import ACTIVATIONS, Actions, exchange_engine, play
from unisono.tensor_parallel.overlap.schedule import SliceTask, TaskKind, schedule_pass

SECONDS = 60
"""Seconds after which a wait in a test has failed."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = exchange_engine(None)
    yield engine
    engine.close()


class Log:
    """Tasks as they begin, and the threads that carry them out."""

    def __init__(self) -> None:
        self.tasks: list[SliceTask] = []
        self.threads: dict[TaskKind, set[str]] = {}

    def __call__(self, kind: TaskKind, number: int) -> None:
        self.tasks.append(SliceTask(kind, number))
        self.threads.setdefault(kind, set()).add(threading.current_thread().name)


def actions_of(log: Log) -> dict[TaskKind, Actions]:
    return {kind: partial(log, kind) for kind in TaskKind}


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
@pytest.mark.parametrize(("takes", "gives", "whole"), [(True, True, True), (False, True, False), (True, False, True)])
def test_tasks_follow_what_they_need(engine: Engine, slices: int, takes: bool, gives: bool, whole: bool) -> None:
    plan, log = schedule_pass(slices, takes, gives, whole=whole), Log()
    waited = play(plan, actions_of(log), engine)
    for order in (plan.products, plan.exchanges):
        assert [task for task in log.tasks if task in order] == list(order)
    for task, needs in plan.needs.items():
        assert all(log.tasks.index(need) < log.tasks.index(task) for need in needs)
    here = threading.current_thread().name
    assert all(
        (here in threads) == (kind in (TaskKind.PRODUCT, TaskKind.WHOLE)) for kind, threads in log.threads.items()
    )
    assert waited >= 0


def test_an_exchange_is_under_way_while_the_next_slice_is_computed(engine: Engine) -> None:
    begun = threading.Event()
    computed = threading.Event()

    def make(number: int) -> None:
        if number == 1:
            assert begun.wait(SECONDS), "the exchange of slice 0 does not begin before the product of slice 1 has ended"
            computed.set()

    def give(number: int) -> None:
        if number == 0:
            begun.set()
            assert computed.wait(SECONDS), "the product of slice 1 waits for the exchange of slice 0"

    play(schedule_pass(2, takes=False, gives=True), {TaskKind.PRODUCT: make, TaskKind.GIVE: give}, engine)


def test_a_failed_exchange_is_raised_here_and_those_after_it_are_left_out(engine: Engine) -> None:
    tried: list[int] = []

    def give(number: int) -> None:
        tried.append(number)
        if number == 1:
            raise ValueError("gone")

    with pytest.raises(OperationError, match="give of slice 1 failed: ValueError: gone"):
        play(schedule_pass(4, takes=False, gives=True), {TaskKind.PRODUCT: bool, TaskKind.GIVE: give}, engine)
    assert tried == [0, 1]
    play(schedule_pass(1, takes=False, gives=True), {TaskKind.PRODUCT: bool, TaskKind.GIVE: bool}, engine)


def test_a_failed_product_leaves_nothing_under_way(engine: Engine) -> None:
    tried: list[int] = []

    def make(number: int) -> None:
        if number == 2:
            raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        play(schedule_pass(4, takes=False, gives=True), {TaskKind.PRODUCT: make, TaskKind.GIVE: tried.append}, engine)
    assert tried == [0, 1], "what all ranks have begun is ended"


def test_an_engine_of_a_group_has_one_thread(engine: Engine) -> None:
    assert [(kind, pool._size) for kind, pool in engine._pools.items()] == [(ACTIVATIONS, 1)]
