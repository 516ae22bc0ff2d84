import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.gradients import ALIGNMENT, Bucket, Member, plan_buckets

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def test_an_example() -> None:
    parameters = [(100, torch.float32), (5, torch.float64), (20, torch.float32), (3, torch.float32)]
    assert plan_buckets(parameters, 4 * 48) == [
        Bucket(torch.float32, (Member(3, 0, 3), Member(2, 16, 20)), 48),
        Bucket(torch.float32, (Member(0, 0, 100),), 112),
        Bucket(torch.float64, (Member(1, 0, 5),), 8),
    ]


@given(st.lists(st.tuples(st.integers(0, 1000), dtypes), max_size=30), st.integers(1, 5000))
def test_every_gradient_has_one_place_and_none_overlap(parameters: list, largest: int) -> None:
    buckets = plan_buckets(parameters, largest)
    members = sorted(member.parameter for bucket in buckets for member in bucket.members)
    assert members == list(range(len(parameters)))
    for bucket in buckets:
        end = 0
        for number, start, length in bucket.members:
            assert (length, bucket.dtype) == parameters[number]
            assert start >= end
            assert start * bucket.dtype.itemsize % ALIGNMENT == 0
            end = start + length
        assert end <= bucket.length
        assert len(bucket.members) == 1 or bucket.length * bucket.dtype.itemsize <= largest
