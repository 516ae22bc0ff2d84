from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.counter_rng import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers


@given(st.integers(0, 2**63), st.integers(0, 1000), st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_the_numbers_of_a_sample_do_not_depend_on_its_neighbours(seed: int, epoch: int, samples: list[int]) -> None:
    together = uniform_numbers(seed, epoch, np.array(samples), DRAWS_PER_SAMPLE)
    for row, sample in zip(together, samples, strict=True):
        np.testing.assert_array_equal(row, uniform_numbers(seed, epoch, np.array([sample]), DRAWS_PER_SAMPLE)[0])
    assert (together >= 0).all()
    assert (together < 1).all()


def test_seed_epoch_and_sample_each_change_them() -> None:
    one = uniform_numbers(1, 2, np.array([3]), DRAWS_PER_SAMPLE)
    for other in (
        uniform_numbers(0, 2, np.array([3]), DRAWS_PER_SAMPLE),
        uniform_numbers(1, 1, np.array([3]), DRAWS_PER_SAMPLE),
        uniform_numbers(1, 2, np.array([2]), DRAWS_PER_SAMPLE),
    ):
        assert not (one == other).any()


def test_they_are_spread_evenly_and_do_not_follow_each_other() -> None:
    numbers = uniform_numbers(0, 0, np.arange(20_000), 4)
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())
    columns = np.corrcoef(numbers.T) - np.eye(4)
    neighbours = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert max(abs(columns).max(), abs(neighbours)) < 0.04


def test_numbers_are_returned_one_by_one() -> None:
    throws = CounterRNG([0.5, 0.25])
    assert (throws.random(), throws.random()) == (0.5, 0.25)
