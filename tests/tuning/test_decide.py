import math
import random

from hypothesis import given
from hypothesis import strategies as st

from unisono.tuning.decide import Timing, rows, timing_of, worth_another


def exact(**medians: float) -> dict[str, Timing]:
    return {name: Timing(median, median, median) for name, median in medians.items()}


def test_fastest_is_chosen_and_adjacent_sizes_are_joined() -> None:
    timings = {
        1024: exact(ring=2.1, tree=0.9),
        4096: exact(ring=2.2, tree=1.2),
        16384: exact(ring=2.3, tree=2.9),
        65536: exact(ring=3.0),
    }
    found = rows(timings)
    assert [(row.up_to, row.algorithm) for row in found] == [(8192, "tree"), (None, "ring")]
    assert found[0].timing.median == 1.2


def test_equally_fast_choice_is_kept() -> None:
    timings = {4: exact(tree=1.0, ring=2.0), 16: {"tree": Timing(1.01, 0.9, 1.1), "ring": Timing(1.0, 0.9, 1.1)}}
    assert [row.algorithm for row in rows(timings)] == ["tree"]
    timings[16]["tree"] = Timing(1.2, 1.1, 1.3)
    assert [row.algorithm for row in rows(timings)] == ["tree", "ring"]


@given(st.dictionaries(st.integers(1, 10**9), st.sampled_from(["a", "b", "c"]), min_size=1))
def test_every_size_is_served_by_its_fastest(fastest: dict[int, str]) -> None:
    timings = {size: exact(**{name: 1.0 if name == best else 9.0 for name in "abc"}) for size, best in fastest.items()}
    found = rows(timings)
    assert [row.up_to is None for row in found] == [False] * (len(found) - 1) + [True]
    for size, best in fastest.items():
        assert next(row.algorithm for row in found if row.up_to is None or size <= row.up_to) == best


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
