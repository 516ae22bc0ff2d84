"""Smallest period: what is exposed is at most a twentieth of computing, and one step less would have more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.rules import DiLoCo, LocalSGD
from unisono.rules.period import EXPOSED_SHARE, LARGEST_PERIOD, smallest_period
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import even_layout
from unisono.step.predict import predict


@given(st.floats(1e-4, 10), st.floats(0, 10), st.integers(1, 8), st.integers(0, 5))
def test_it_is_the_smallest_that_hides(computing: float, exchange: float, fragments: int, delay: int) -> None:
    found = smallest_period(computing, exchange, fragments, delay)
    least = fragments * (delay + 1)
    exposed = max(0.0, exchange - fragments * delay * computing)
    assert least <= found <= max(least, LARGEST_PERIOD)
    if found < LARGEST_PERIOD:
        assert exposed <= EXPOSED_SHARE * found * computing * (1 + 1e-5)
    if found > least:
        assert exposed > EXPOSED_SHARE * (found - 1) * computing * (1 - 1e-5)


@given(st.floats(0, 5), st.floats(0, 5), st.integers(1, 4), st.integers(0, 3))
def test_slower_links_have_longer_periods(one: float, other: float, fragments: int, delay: int) -> None:
    fast, slow = sorted((one, other))
    assert smallest_period(0.1, fast, fragments, delay) <= smallest_period(0.1, slow, fragments, delay)


def test_steps_without_computing_have_no_period() -> None:
    with pytest.raises(UsageError, match=r"a step of 0.0 s with an exchange of 1.0 s has no period"):
        smallest_period(0.0, 1.0)


@pytest.mark.parametrize("rule", [LocalSGD(every="auto"), DiLoCo(every="auto", fragments=2, delay=1)])
@pytest.mark.parametrize("exchange", [0.5, 4.0, 40.0])
def test_predicted_steps_wait_as_little_as_promised(rule: LocalSGD, exchange: float) -> None:
    """The rule's own programs on the clock: with the chosen period a step takes at most a twentieth longer."""
    layout = even_layout(4, 4)
    nbytes = sum(one.nbytes for one in layout.buckets)
    costs = Costs(layout, Computing((0.0, 1.0, 2.0, 3.0), (9.0, 8.0, 7.0, 5.0), 9.0), Cost(0.0, exchange / nbytes))
    chosen = rule.with_period(rule.smallest_period(9.0, exchange))
    assert predict(chosen, costs).step <= 9.0 * (1 + EXPOSED_SHARE) + 1e-9
