import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.step.costs import Cost, fit

measurements = st.lists(st.tuples(st.integers(1, 1 << 27), st.floats(1e-6, 10)), min_size=1, max_size=20)


def test_a_cost_is_a_latency_plus_a_time_for_each_byte() -> None:
    assert Cost(1.0, 2.0).seconds(10) == 21
    assert Cost(1.0, 2.0).seconds(0) == 1


def test_the_fit_is_the_least_squares_line() -> None:
    assert fit([1, 2, 3], [3.0, 5.0, 7.0]) == Cost(1.0, 2.0)
    assert fit([2, 2, 6, 6], [4.0, 6.0, 12.0, 14.0]) == Cost(1.0, 2.0)


def test_measurements_of_one_size_give_no_latency() -> None:
    assert fit([4], [2.0]) == Cost(0.0, 0.5)
    assert fit([4, 4], [1.0, 3.0]) == Cost(0.0, 0.5)


@pytest.mark.parametrize("seconds", [[3.0, 1.0], [2.0, 2.0], [0.0, 4.0]])
def test_a_line_that_falls_or_begins_below_0_is_noise(seconds: list[float]) -> None:
    assert fit([1, 3], seconds) == Cost(0.0, 1.0)


def test_exchanges_of_nothing_cost_a_latency() -> None:
    assert fit([0, 0], [1.0, 3.0]) == Cost(2.0, 0.0)


@given(
    st.lists(st.integers(1, 1 << 20), min_size=2, max_size=20, unique=True),
    st.integers(0, 1000),
    st.integers(1, 1000),
)
def test_points_on_a_line_are_fitted_exactly(sizes: list[int], latency: int, per_byte: int) -> None:
    fitted = fit(sizes, [latency + size * per_byte for size in sizes])
    longest = latency + max(sizes) * per_byte
    assert fitted.latency == pytest.approx(latency, abs=1e-9 * longest)
    assert fitted.per_byte == pytest.approx(per_byte, abs=1e-9 * longest)


@given(measurements)
def test_no_part_is_negative_and_the_total_time_is_kept(measured: list[tuple[int, float]]) -> None:
    sizes, seconds = zip(*measured, strict=True)
    fitted = fit(sizes, seconds)
    assert fitted.latency >= 0
    assert fitted.per_byte >= 0
    assert sum(map(fitted.seconds, sizes)) == pytest.approx(sum(seconds))


@example([(806, 1.4), (806, 3.4), (1, 2.4), (64, 2.4)], random.Random(2))  # a level line, but for rounding
@given(measurements, st.randoms())
def test_the_fit_does_not_depend_on_the_order(measured: list[tuple[int, float]], chance: random.Random) -> None:
    shuffled = chance.sample(measured, len(measured))
    fitted, refitted = (fit(*map(list, zip(*rows, strict=True))) for rows in (measured, shuffled))
    for size in (1, 1 << 20, 1 << 27):
        assert fitted.seconds(size) == pytest.approx(refitted.seconds(size), rel=1e-6)
