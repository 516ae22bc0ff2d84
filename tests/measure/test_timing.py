"""Times of calls become a median with its interval; slow calls get no more trials."""

from __future__ import annotations

import math
import random

from unisono.measure.timing import Timing, timing_of, worth_another


def test_interval_contains_the_median_at_its_confidence() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(2000):
        timing = timing_of([chance.gauss(0, 1) for _ in range(21)])
        held += timing.low <= 0 <= timing.high
    assert held > 0.95 * 2000
    assert timing_of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0)
    assert math.isclose(timing_of([1.0, 2.0]).median, 1.5)


def test_slow_candidates_get_no_more_trials() -> None:
    assert worth_another({"a": [1.0, 1.1, 1.2], "b": [1.5, 3.0], "c": [1.8, 1.9]}) == {"a", "b"}
