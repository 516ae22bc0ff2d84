"""Schedules: every exchange follows its product, and no product waits for an exchange that it does not need."""

from __future__ import annotations

from itertools import product

import pytest

from unisono.tensor_parallel.overlap.schedule import PassSchedule, SliceTask, TaskKind, schedule_pass

FORMS = [form for form in product((False, True), repeat=4) if form[2] or form[3]]


def finish(plan: PassSchedule, product: float, exchange: float) -> float:
    """Time at which both threads are done, on a simulated clock; raises StopIteration for tasks that wait forever."""
    over, clocks = dict[SliceTask, float](), {plan.products: 0.0, plan.exchanges: 0.0}
    left = {thread: list(thread) for thread in clocks}
    while any(left.values()):
        thread = next(one for one, tasks in left.items() if tasks and over.keys() >= set(plan.needs.get(tasks[0], ())))
        task = left[thread].pop(0)
        begin = max([clocks[thread], *(over[need] for need in plan.needs.get(task, ()))])
        over[task] = clocks[thread] = begin + (product if thread is plan.products else exchange)
    return max(clocks.values())


@pytest.mark.parametrize("slices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("takes", "gives", "products", "whole"), FORMS)
def test_each_task_needs_its_own_slice_alone(
    slices: int, takes: bool, gives: bool, products: bool, whole: bool
) -> None:
    plan = schedule_pass(slices, takes, gives, products, whole)
    taken, made, given = (
        [SliceTask(kind, number) for number in range(slices) if wanted]
        for kind, wanted in (
            (TaskKind.TAKE, takes),
            (TaskKind.PRODUCT, products),
            (TaskKind.GIVE, gives and products),
        )
    )
    last = SliceTask(TaskKind.WHOLE, 0)
    assert list(plan.products) == made + [last] * whole
    assert list(plan.exchanges) == taken + given, "one order on all ranks"
    assert not any(plan.needs.get(task) for task in taken)
    for task in made:
        assert plan.needs.get(task, ()) == tuple(taken[task.number : task.number + 1])
    assert all(plan.needs[task] == (SliceTask(TaskKind.PRODUCT, task.number),) for task in given)
    assert plan.needs.get(last, ()) == (tuple(taken) if whole else ())
    finish(plan, 1, 1)


@pytest.mark.parametrize(("product", "exchange"), [(1, 1), (1, 3), (3, 1), (0, 1), (1, 0)])
@pytest.mark.parametrize(("takes", "gives"), [(True, False), (False, True)])
def test_all_but_one_slice_of_the_shorter_work_is_hidden(
    product: float, exchange: float, takes: bool, gives: bool
) -> None:
    for slices in (1, 2, 4, 7):
        took = finish(schedule_pass(slices, takes, gives), product, exchange)
        assert took == slices * max(product, exchange) + min(product, exchange)


def test_the_whole_product_is_beside_the_last_exchange() -> None:
    assert finish(schedule_pass(1, False, True, whole=True), 2, 2) == 4
    assert finish(schedule_pass(4, False, True, whole=True), 1, 1) == 5
