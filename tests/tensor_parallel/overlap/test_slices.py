"""Slices are as many as their limits allow, and never none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.tensor_parallel.overlap.slices import SliceLimits, number_of_slices

counts = st.integers(1, 10_000)


@given(st.integers(0, 10**6), st.integers(0, 10**9), counts, counts, counts)
def test_no_slice_is_below_the_limits(rows: int, nbytes: int, least_bytes: int, least_rows: int, most: int) -> None:
    found = number_of_slices(rows, nbytes, SliceLimits(least_bytes, least_rows, most))
    assert 1 <= found <= most
    assert found == 1 or (found * least_rows <= rows and found * least_bytes <= nbytes)
    more = found + 1
    assert more > most or more * least_rows > rows or more * least_bytes > nbytes
