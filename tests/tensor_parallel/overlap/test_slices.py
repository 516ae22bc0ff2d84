"""Slices are as many as their limits allow, and never none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.tensor_parallel.overlap.slices import SliceLimits, number_of_slices

counts = st.integers(1, 10_000)


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.integers(1, 3), counts, counts, counts, counts)
def test_no_slice_is_below_the_limits(
    rows: int, nbytes: int, nodes: int, least_bytes: int, least_rows: int, most: int, within: int
) -> None:
    found = number_of_slices(rows, nbytes, nodes, SliceLimits(least_bytes, least_rows, most, within))
    bound = within if nodes == 1 else most
    assert 1 <= found <= bound
    assert found == 1 or (found * least_rows <= rows and found * least_bytes <= nbytes)
    more = found + 1
    assert more > bound or more * least_rows > rows or more * least_bytes > nbytes


def test_exchanges_within_a_node_are_waited_for() -> None:
    assert number_of_slices(512, 512 * 4096 * 4, 1, SliceLimits()) == 1
