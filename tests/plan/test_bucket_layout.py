from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.bucket_layout import ALIGNMENT, BucketSlice, plan_memory, required_elements

FLOAT, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16

Parameters = list[tuple[int, torch.dtype]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Parameters, list[int], int]:
    """Parameters, the order in which their gradients come, and what a bucket holds."""
    lengths = st.one_of(st.integers(0, 40), st.integers(0, 2000))
    parameters = draw(st.lists(st.tuples(lengths, st.sampled_from([FLOAT, DOUBLE, HALF])), max_size=20))
    return parameters, draw(st.permutations(range(len(parameters)))), draw(st.integers(1, 6000))


def aligned(nbytes: int) -> int:
    """Bytes, up to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def test_the_example() -> None:
    """The picture, with a line of 16 floats for an element."""
    parameters = [(32, FLOAT), (48, FLOAT), (144, FLOAT), (16, FLOAT)]
    layout = plan_memory(parameters, [3, 1, 2, 0], 4 * ALIGNMENT)
    assert layout.starts == (240, 16, 80, 0)
    assert layout.lengths == {(FLOAT, 1): 288}
    assert layout.buckets == (
        BucketSlice(FLOAT, 0, 80, (3, 1), 64, (3, 1)),
        BucketSlice(FLOAT, 80, 128, (2,), 128, ()),
        BucketSlice(FLOAT, 128, 176, (2,), 176, ()),
        BucketSlice(FLOAT, 176, 240, (2,), 224, (2,)),
        BucketSlice(FLOAT, 240, 288, (0,), 272, (0,)),
    )
    assert [bucket.nbytes for bucket in layout.buckets] == [5 * 64, 3 * 64, 3 * 64, 4 * 64, 3 * 64]


def test_each_dtype_has_its_own_memory_and_buckets_are_in_the_order_they_fill() -> None:
    """The doubles are complete between the first and the last of the floats."""
    parameters = [(20, FLOAT), (5, DOUBLE), (3, FLOAT)]
    layout = plan_memory(parameters, [2, 1, 0], 1000)
    assert layout.starts == (16, 0, 0)
    assert layout.lengths == {(FLOAT, 1): 64, (DOUBLE, 1): 16}
    assert layout.buckets == (BucketSlice(DOUBLE, 0, 16, (1,), 8, (1,)), BucketSlice(FLOAT, 0, 64, (2, 0), 48, (2, 0)))


def test_the_smallest_buckets_are_one_cache_line() -> None:
    layout = plan_memory([(40, FLOAT)], [0], 1)
    assert [bucket.stop - bucket.start for bucket in layout.buckets] == [16, 16, 32]


def test_no_parameters() -> None:
    assert plan_memory([], [], 100) == ((), {}, ())
    assert required_elements([]) == {}


def test_parameters_without_elements_still_have_flags() -> None:
    layout = plan_memory([(0, FLOAT), (0, FLOAT)], [0, 1], 100)
    assert layout.buckets == (BucketSlice(FLOAT, 0, 16, (0, 1), 0, (0, 1)),)


@given(cases())
def test_every_element_lies_in_one_bucket_and_nothing_overlaps(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest)
    owners = {dtype: Counter[int]() for _, dtype in parameters}
    for bucket in layout.buckets:
        inside = []
        for number in bucket.parameters:
            length, dtype = parameters[number]
            assert dtype is bucket.dtype
            first = layout.starts[number]
            inside += range(max(bucket.start, first), min(bucket.flags, first + length))
        flags = range(bucket.flags, bucket.flags + len(bucket.ends))
        owners[bucket.dtype].update([*inside, *flags])
        assert not inside or bucket.start <= min(inside) <= max(inside) < bucket.flags
        assert bucket.flags + len(bucket.ends) <= bucket.stop
    for dtype, places in owners.items():
        own = [
            place
            for (length, its), start in zip(parameters, layout.starts, strict=True)
            if its is dtype
            for place in range(start, start + length)
        ]
        assert set(own) <= set(places)
        assert max(places.values(), default=1) == 1
        assert len(places) == len(own) + sum(its is dtype for _, its in parameters)


@given(cases())
def test_buckets_are_the_memory_end_to_end(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest)
    assert set(layout.lengths) == {(dtype, 1) for _, dtype in parameters}
    for (dtype, _), length in layout.lengths.items():
        end = 0
        for bucket in sorted((one for one in layout.buckets if one.dtype is dtype), key=lambda one: one.start):
            assert bucket.start == end < bucket.stop
            end = bucket.stop
        assert end == length


@given(cases())
def test_all_starts_are_aligned(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest)
    for (_, dtype), start in zip(parameters, layout.starts, strict=True):
        assert start * dtype.itemsize % ALIGNMENT == 0
    for bucket in layout.buckets:
        assert all(place * bucket.dtype.itemsize % ALIGNMENT == 0 for place in bucket[1:3])
        assert bucket.flags * bucket.dtype.itemsize % ALIGNMENT == 0


@given(cases())
def test_each_parameter_ends_once_where_its_last_element_lies(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest)
    assert sorted(number for bucket in layout.buckets for number in bucket.ends) == list(range(len(parameters)))
    for bucket in layout.buckets:
        assert set(bucket.ends) <= set(bucket.parameters)
        assert bucket.ends == bucket.parameters or (len(bucket.parameters) == 1 and not bucket.ends)
        for number in bucket.ends:
            assert bucket.start <= layout.starts[number] + parameters[number][0] <= bucket.flags


@given(cases())
def test_a_bucket_is_no_larger_than_allowed(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    for bucket in plan_memory(parameters, order, largest).buckets:
        size = bucket.dtype.itemsize
        assert (bucket.flags - bucket.start) * size <= max(ALIGNMENT, largest // ALIGNMENT * ALIGNMENT)
        assert bucket.nbytes == (bucket.flags - bucket.start) * size + aligned(len(bucket.ends) * size)


@given(cases())
def test_no_bucket_is_closed_before_it_has_to_be(case: tuple[Parameters, list[int], int]) -> None:
    """The next gradient would not have fitted in, or there are no other parts than of one that is cut."""
    parameters, order, largest = case
    max_elements = max(ALIGNMENT, largest // ALIGNMENT * ALIGNMENT)
    layout = plan_memory(parameters, order, largest)
    sizes = [aligned(length * dtype.itemsize) for length, dtype in parameters]
    for dtype, _ in layout.lengths:
        buckets = sorted((one for one in layout.buckets if one.dtype is dtype), key=lambda one: one.start)
        for bucket, after in pairwise(buckets):
            if sizes[bucket.parameters[0]] <= max_elements:
                assert (bucket.flags - bucket.start) * dtype.itemsize + sizes[after.parameters[0]] > max_elements


@given(cases())
def test_only_gradients_larger_than_a_bucket_are_split_into_equal_parts(
    case: tuple[Parameters, list[int], int],
) -> None:
    parameters, order, largest = case
    max_elements = max(ALIGNMENT, largest // ALIGNMENT * ALIGNMENT)
    layout = plan_memory(parameters, order, largest)
    for number, (length, dtype) in enumerate(parameters):
        of = [bucket for bucket in layout.buckets if number in bucket.parameters]
        assert len(of) == max(1, -(-aligned(length * dtype.itemsize) // max_elements))
        if len(of) > 1:
            assert all(bucket.parameters == (number,) for bucket in of)
            parts = [(bucket.flags - bucket.start) * dtype.itemsize for bucket in of]
            assert max(parts) - min(parts) <= ALIGNMENT


@given(cases())
def test_buckets_are_in_the_order_in_which_they_fill(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest)
    full = [max(order.index(number) for number in bucket.parameters) for bucket in layout.buckets]
    assert full == sorted(full)
    for number in range(len(parameters)):
        parts = [bucket.start for bucket in layout.buckets if number in bucket.parameters]
        assert parts == sorted(parts)


@given(cases())
def test_the_required_elements_suffice(case: tuple[Parameters, list[int], int]) -> None:
    parameters, order, largest = case
    room, layout = required_elements(parameters), plan_memory(parameters, order, largest)
    assert set(room) == set(layout.lengths)
    for kind, length in layout.lengths.items():
        assert length <= room[kind]


@pytest.mark.parametrize("largest", [1, 64, 100, 6400, 1 << 30])
def test_the_required_elements_of_many_parameters_are_little_more_than_theirs(largest: int) -> None:
    parameters = [(length, FLOAT) for length in range(1, 3000, 7)]
    (length,) = plan_memory(parameters, range(len(parameters)), largest).lengths.values()
    taken = sum(length for length, _ in parameters)
    assert taken < length <= required_elements(parameters)[FLOAT, 1] < 1.05 * taken


def test_parameters_that_are_split_over_other_numbers_of_ranks_share_no_bucket() -> None:
    parameters = [(40, FLOAT), (3, FLOAT), (5, FLOAT)]
    layout = plan_memory(parameters, [2, 1, 0], 1 << 20, counts=[1, 2, 1])
    assert [(one.parameters, one.parts) for one in layout.buckets] == [((1,), 2), ((2, 0), 1)]
    assert set(layout.lengths) == {(FLOAT, 1), (FLOAT, 2)} == set(required_elements(parameters, [1, 2, 1]))
