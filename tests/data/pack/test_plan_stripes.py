from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.data.pack.packing import plan_stripes, stripe_name

SIZES = st.lists(st.integers(0, 40) | st.sampled_from([1, 1_000]), min_size=1, max_size=60)


@given(sizes=SIZES, stripes=st.integers(1, 40), stripe_bytes=st.integers(1, 120))
@example(sizes=[0, 0, 0], stripes=1, stripe_bytes=1)
@example(sizes=[1, 1_000, 1], stripes=1, stripe_bytes=1_000)
def test_stripes_have_every_sample_once_and_none_is_empty_or_too_large(
    sizes: list[int], stripes: int, stripe_bytes: int
) -> None:
    bounds = plan_stripes(sizes, stripes, stripe_bytes)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert all(start < stop for start, stop in pairwise(bounds))
    assert len(bounds) - 1 >= min(stripes, len(sizes))
    for start, stop in pairwise(bounds):
        assert stop - start == 1 or sum(sizes[start:stop]) <= stripe_bytes


@given(sizes=SIZES, stripes=st.integers(1, 40))
def test_there_are_as_many_stripes_as_wanted_where_none_would_be_too_large(sizes: list[int], stripes: int) -> None:
    bounds = plan_stripes(np.array(sizes), stripes, 1_000_000)
    assert len(bounds) - 1 == min(stripes, len(sizes))
    assert {type(bound) for bound in bounds} == {int}


def test_the_image() -> None:
    assert plan_stripes([90] * 8, 2, 256) == [0, 2, 4, 6, 8]


def test_stripes_have_about_equal_bytes() -> None:
    assert set(np.diff(plan_stripes([100] * 1_000, 32, 1_000_000))) == {31, 32}
    assert plan_stripes([90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2, 1_000) == [0, 1, 10]


def test_one_huge_sample_has_a_stripe_alone_and_leaves_the_others_together() -> None:
    sizes = [1] * 490 + [10_000] + [1] * 510
    bounds = plan_stripes(sizes, 8, 1_000)
    assert (490, 491) in pairwise(bounds)
    assert len(bounds) - 1 <= 8 + 2


@pytest.mark.parametrize("stripes", [1, 32])
def test_no_samples_make_no_stripes(stripes: int) -> None:
    assert list(pairwise(plan_stripes([], stripes, 1))) == []


def test_names_of_stripes_sort_as_their_numbers() -> None:
    assert stripe_name(3) == "stripe-00003.arrow"
    assert sorted(map(stripe_name, (10, 9, 11))) == [stripe_name(stripe) for stripe in (9, 10, 11)]
