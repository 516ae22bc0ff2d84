"""Orders of arrival: each exchange is served once by each server, and no order deadlocks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from unisono.rules import BSP, EASGD
from unisono.rules.asynchronous import random_arrivals
from unisono.step.layout import even_layout
from unisono.step.predict import play_in_random_order
from unisono.step.program import Step


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 1 << 20))
def test_every_exchange_is_served_once(exchanges: list[int], servers: int, seed: int) -> None:
    orders = random_arrivals(exchanges, servers, seed)
    assert len(orders) == servers
    for order in orders:
        assert Counter(order) == Counter({worker: count for worker, count in enumerate(exchanges) if count})


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 20))
def test_no_order_deadlocks(workers: int, servers: int, seed: int) -> None:
    steps = [Step(step) for step in range(4)]
    programs = EASGD(servers=servers).programs(even_layout(workers + servers, servers + 1), steps, seed)
    ran = list[int]()
    play_in_random_order(programs, lambda together: ran.append(len(together)), seed)
    assert sum(ran) == sum(map(len, programs))


def test_other_rules_have_a_program_for_each_rank() -> None:
    layout, steps = even_layout(3, 2), [Step(0), Step(1)]
    assert BSP().programs(layout, steps)[2] == (*BSP()(Step(0), 2, layout), *BSP()(Step(1), 2, layout))
