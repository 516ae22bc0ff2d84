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


Case = tuple[Parameters, list[int], int]

END_RATIO = st.sampled_from([1, 4, 16])


@st.composite
def cases(draw: st.DrawFn) -> Case:
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


@given(cases(), END_RATIO)
def test_every_element_lies_in_one_bucket_and_nothing_overlaps(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest, (), end_ratio)
    owners = {dtype: Counter[int]() for _, dtype in parameters}
    for bucket in layout.buckets:
        inside = []
        for parameter in bucket.parameters:
            length, dtype = parameters[parameter]
            assert dtype is bucket.dtype
            first = layout.starts[parameter]
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


@given(cases(), END_RATIO)
def test_buckets_are_the_memory_end_to_end(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest, (), end_ratio)
    assert set(layout.lengths) == {(dtype, 1) for _, dtype in parameters}
    for (dtype, _), length in layout.lengths.items():
        end = 0
        for bucket in sorted(
            (bucket for bucket in layout.buckets if bucket.dtype is dtype), key=lambda bucket: bucket.start
        ):
            assert bucket.start == end < bucket.stop
            end = bucket.stop
        assert end == length


@given(cases(), END_RATIO)
def test_all_starts_are_aligned(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest, (), end_ratio)
    for (_, dtype), start in zip(parameters, layout.starts, strict=True):
        assert start * dtype.itemsize % ALIGNMENT == 0
    for bucket in layout.buckets:
        assert all(place * bucket.dtype.itemsize % ALIGNMENT == 0 for place in bucket[1:3])
        assert bucket.flags * bucket.dtype.itemsize % ALIGNMENT == 0


@given(cases(), END_RATIO)
def test_each_parameter_ends_once_where_its_last_element_lies(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest, (), end_ratio)
    assert sorted(parameter for bucket in layout.buckets for parameter in bucket.ends) == list(range(len(parameters)))
    for bucket in layout.buckets:
        assert set(bucket.ends) <= set(bucket.parameters)
        assert bucket.ends == bucket.parameters or (len(bucket.parameters) == 1 and not bucket.ends)
        for parameter in bucket.ends:
            assert bucket.start <= layout.starts[parameter] + parameters[parameter][0] <= bucket.flags


def limit(before: int, behind: int, largest: int, end_ratio: int) -> int:
    """Bytes of gradients that a bucket may hold: at most twice those before it, and twice those behind it, which are a
    third of all from its start; but as many as the first and the last in any case."""
    most, ends = (max(ALIGNMENT, nbytes // ALIGNMENT * ALIGNMENT) for nbytes in (largest, largest // end_ratio))
    return min(most, max(ends, min(2 * before, behind * 2 // 3) // ALIGNMENT * ALIGNMENT))


def allowed(buckets: list[BucketSlice], largest: int, end_ratio: int) -> list[int]:
    """Bytes of gradients that each bucket of one memory may hold."""
    sizes = [(bucket.flags - bucket.start) * bucket.dtype.itemsize for bucket in buckets]
    return [limit(sum(sizes[:at]), sum(sizes[at:]), largest, end_ratio) for at in range(len(sizes))]


def by_dtype(buckets: tuple[BucketSlice, ...]) -> list[list[BucketSlice]]:
    """Buckets of each memory, in their order there."""
    order = sorted(buckets, key=lambda bucket: bucket.start)
    return [[bucket for bucket in order if bucket.dtype is dtype] for dtype in {bucket.dtype for bucket in buckets}]


def test_buckets_are_small_at_both_ends() -> None:
    """60 gradients of a cache line, or one as large as all, in buckets of 16; the first and the last hold 2."""
    holds = [2, 4, 12, 16, 16, 6, 2, 2]
    layout = plan_memory([(16, FLOAT)] * 60, range(60), 16 * ALIGNMENT, (), 8)
    assert [len(bucket.parameters) for bucket in layout.buckets] == holds
    layout = plan_memory([(16 * 60, FLOAT)], [0], 16 * ALIGNMENT, (), 8)
    assert [(bucket.flags - bucket.start) // 16 for bucket in layout.buckets] == holds


@given(cases(), END_RATIO)
def test_a_bucket_is_no_larger_than_allowed(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    for buckets in by_dtype(plan_memory(parameters, order, largest, (), end_ratio).buckets):
        cut = Counter(parameter for bucket in buckets for parameter in bucket.parameters)
        for bucket, most in zip(buckets, allowed(buckets, largest, end_ratio), strict=True):
            size = bucket.dtype.itemsize
            uncut = cut[bucket.parameters[0]] == 1
            assert (bucket.flags - bucket.start) * size <= (most if uncut else limit(0, 0, largest, 1))
            assert bucket.nbytes == (bucket.flags - bucket.start) * size + aligned(len(bucket.ends) * size)


@given(cases(), END_RATIO)
def test_no_bucket_is_closed_before_it_has_to_be(case: Case, end_ratio: int) -> None:
    """The next gradient would not have fitted in, or the bucket is part of one that is cut."""
    parameters, order, largest = case
    sizes = [aligned(length * dtype.itemsize) for length, dtype in parameters]
    for buckets in by_dtype(plan_memory(parameters, order, largest, (), end_ratio).buckets):
        cut = Counter(parameter for bucket in buckets for parameter in bucket.parameters)
        for (bucket, after), most in zip(pairwise(buckets), allowed(buckets, largest, end_ratio), strict=False):
            if cut[bucket.parameters[0]] == 1:
                assert (bucket.flags - bucket.start) * bucket.dtype.itemsize + sizes[after.parameters[0]] > most


@given(cases(), END_RATIO)
def test_a_gradient_that_is_larger_than_a_bucket_is_cut_in_proportion_to_what_buckets_hold(
    case: Case, end_ratio: int
) -> None:
    parameters, order, largest = case
    for buckets in by_dtype(plan_memory(parameters, order, largest, (), end_ratio).buckets):
        parts: dict[int, list[int]] = {}
        before, behind = 0, sum((bucket.flags - bucket.start) * bucket.dtype.itemsize for bucket in buckets)
        for bucket in buckets:
            parts.setdefault(bucket.parameters[0], []).append((bucket.flags - bucket.start) * bucket.dtype.itemsize)
        for sizes in parts.values():
            length, shares = sum(sizes), list[int]()
            while len(sizes) > 1 and sum(shares) < length:
                shares.append(limit(before + sum(shares), behind - sum(shares), largest, end_ratio))
            assert len(shares) == (len(sizes) if len(sizes) > 1 else 0)
            for size, share in zip(sizes, shares, strict=False):
                assert 0 < size <= share
                assert abs(size - length * share / sum(shares)) <= ALIGNMENT
            before, behind = before + length, behind - length


@given(cases())
def test_only_gradients_larger_than_a_bucket_are_split_into_equal_parts(
    case: Case,
) -> None:
    parameters, order, largest = case
    max_elements = max(ALIGNMENT, largest // ALIGNMENT * ALIGNMENT)
    layout = plan_memory(parameters, order, largest)
    for parameter, (length, dtype) in enumerate(parameters):
        of = [bucket for bucket in layout.buckets if parameter in bucket.parameters]
        assert len(of) == max(1, -(-aligned(length * dtype.itemsize) // max_elements))
        if len(of) > 1:
            assert all(bucket.parameters == (parameter,) for bucket in of)
            parts = [(bucket.flags - bucket.start) * dtype.itemsize for bucket in of]
            assert max(parts) - min(parts) <= ALIGNMENT


@given(cases(), END_RATIO)
def test_buckets_are_in_the_order_in_which_they_fill(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    layout = plan_memory(parameters, order, largest, (), end_ratio)
    full = [max(order.index(parameter) for parameter in bucket.parameters) for bucket in layout.buckets]
    assert full == sorted(full)
    for parameter in range(len(parameters)):
        parts = [bucket.start for bucket in layout.buckets if parameter in bucket.parameters]
        assert parts == sorted(parts)


@given(cases(), END_RATIO)
def test_the_required_elements_suffice(case: Case, end_ratio: int) -> None:
    parameters, order, largest = case
    room, layout = required_elements(parameters), plan_memory(parameters, order, largest, (), end_ratio)
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
    assert [(bucket.parameters, bucket.parts) for bucket in layout.buckets] == [((1,), 2), ((2, 0), 1)]
    assert set(layout.lengths) == {(FLOAT, 1), (FLOAT, 2)} == set(required_elements(parameters, [1, 2, 1]))
