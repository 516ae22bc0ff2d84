"""Blocks that a node keeps: within the bytes allowed, evenly along the pack. Ranks that share them: tests/mpi/data."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.storage.node_memory import choose_cached

SIZES = st.lists(st.integers(0, 1000), max_size=40).map(lambda sizes: np.array(sizes, np.int64))


@given(SIZES, st.integers(0, 50_000))
def test_any_stretch_of_the_pack_has_its_part_of_the_cache(nbytes: np.ndarray, allowed: int) -> None:
    cached = choose_cached(nbytes, allowed)
    share = min(1.0, allowed / max(1, int(nbytes.sum())))
    assert nbytes[cached].sum() <= allowed
    due, held = share * nbytes.cumsum(), np.where(cached, nbytes, 0).cumsum()
    assert (held <= due + 1e-6).all()
    assert (held > due - int(nbytes.max(initial=0)) - 1e-6).all() or not len(nbytes)


@given(SIZES, st.integers(0, 5))
def test_a_cache_as_large_as_the_pack_holds_all_of_it(nbytes: np.ndarray, more: int) -> None:
    assert choose_cached(nbytes, int(nbytes.sum()) + more).tolist() == (nbytes > 0).tolist()


def test_the_picture() -> None:
    nine = np.full(9, 4_000_000)
    assert np.flatnonzero(choose_cached(nine, 12_000_000)).tolist() == [2, 5, 8]
    assert not choose_cached(nine, 3_999_999).any()
