"""Weights of whole and of split gradients make a mean over samples, for any groups and any samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import one_rank_per_node
from unisono.reducer.control import ControlMessage, decode, encode
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.tensor_parallel.groups import holders, model_groups


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_a_sample_counts_once(size: int, groups: int, declared: bool, data: st.DataObject) -> None:
    ranks = size * groups
    samples = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any))
    messages = [ControlMessage(float(one) if declared else None) for one in samples]
    sums = [
        sum(column) for column in zip(*(encode(one, rank, ranks) for rank, one in enumerate(messages)), strict=True)
    ]
    result, placement = decode(sums), one_rank_per_node(ranks)
    expected = [one / sum(samples) if declared else 1 / ranks for one in samples]
    assert [result.weight_of(one) for one in messages] == pytest.approx(expected)
    for group in model_groups(placement, size):  # the gradients that the members of a group sum are weighed before
        weighed = [samples[rank] if declared else 1 for rank in group]
        assert [one * result.weight_of_part for one in weighed] == pytest.approx([expected[rank] for rank in group])


def test_the_ranks_that_hold_a_part() -> None:
    parts = ParameterParts((1, 2), {2: holders(one_rank_per_node(4), 2)})
    assert (parts.of(0), parts.of(1)) == (1, 2)
    assert list(parts.holders_of(0, 3, 4)) == [0, 1, 2, 3]
    assert list(parts.holders_of(1, 3, 4)) == [1, 3]


def test_without_parts() -> None:
    assert UNSPLIT.of(3) == 1
    assert list(UNSPLIT.holders_of(3, 0, 2)) == [0, 1]
