"""Weights of ranks and factors of parts make means over samples, and sums over groups, for any groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import one_rank_per_node
from unisono.reducer.parameter_parts import UNSPLIT, ParameterParts
from unisono.tensor_parallel.groups import model_groups


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_a_sample_counts_once(sizes: list[int], shares: int, data: st.DataObject) -> None:
    sharing = model_groups(sizes, one_rank_per_node(12 * shares)).shared_by
    groups = model_groups(sizes, one_rank_per_node(sharing * shares))
    samples = data.draw(st.lists(st.integers(1, 9), min_size=shares, max_size=shares))
    share_of = {rank: number for number, group in enumerate(groups.sharing) for rank in group}
    total = sum(samples[share] for share in share_of.values())
    parts = ParameterParts(tuple(sizes), {size: groups.holders(size) for size in sizes}, sharing)
    for size in (1, *sizes):
        for holders in groups.holders(size):
            weight = [samples[share_of[rank]] / total * parts.scale(size, mean=True) for rank in holders]
            assert sum(weight) == pytest.approx(1)
            assert sum(parts.scale(size, mean=False) for _ in holders) == pytest.approx(shares)


def test_without_parts() -> None:
    assert (UNSPLIT.of(3), UNSPLIT.scale(1, mean=True), UNSPLIT.scale(1, mean=False)) == (1, 1.0, 1.0)
    assert ParameterParts((1, 2)).of(1) == 2
