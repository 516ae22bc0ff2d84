"""Parts of parameters: their holders, and the weights of their gradients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import model_groups, one_rank_per_node
from unisono.reducer.control import ControlMessage, decode, encode
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts


@given(st.sampled_from([2, 3, 4]), st.integers(1, 3), st.booleans(), st.data())
def test_a_sample_counts_once(size: int, groups: int, declared: bool, data: st.DataObject) -> None:
    ranks = size * groups
    samples = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks).filter(any))
    weights = [float(count) if declared else 1.0 for count in samples]
    messages = [ControlMessage(float(count) if declared else None) for count in samples]
    sums = [
        sum(column)
        for column in zip(*(encode(message, rank, ranks) for rank, message in enumerate(messages)), strict=True)
    ]
    result, partition = decode(sums), model_groups(one_rank_per_node(ranks), size)
    parts = ParameterParts((), {size: partition})
    expected = [weight / sum(weights) for weight in weights]
    assert [result.weight_of(message) for message in messages] == pytest.approx(expected)
    for group in partition:  # a member's gradient is that of the group's mean, in which each rank has its share
        total = sum(weights[rank] for rank in group)
        factor = parts.weight(weights, group[-1], size, mean=True)
        shares = [factor * weights[rank] / total if total else 0.0 for rank in group]
        assert shares == pytest.approx([expected[rank] for rank in group])


def test_the_ranks_that_hold_a_part() -> None:
    parts = ParameterParts((1, 2), {2: model_groups(one_rank_per_node(4), 2)})
    assert (parts.of(0), parts.of(1)) == (1, 2)
    assert parts.weight((1, 2, 3, 4), 3, 1, mean=True) == 0.4
    assert parts.weight((1, 2, 3, 4), 3, 2, mean=True) == 0.7
    assert list(parts.holders_of(0, 3, 4)) == [0, 1, 2, 3]
    assert list(parts.holders_of(1, 3, 4)) == [1, 3]


def test_without_parts() -> None:
    assert UNSPLIT.of(3) == 1
    assert list(UNSPLIT.holders_of(3, 0, 2)) == [0, 1]
