"""Which shares are computed again, and checksums of integers whose sums are checked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.training.audit import MODULUS, TILE, checksum, choose_rechecks


@pytest.mark.parametrize(("shares", "ranks"), [(8, 1), (8, 2), (8, 3), (12, 4)])
@pytest.mark.parametrize("fraction", [0.1, 0.3, 1.0])
def test_the_fraction_of_all_shares_is_computed_again(shares: int, ranks: int, fraction: float) -> None:
    steps = 1 if fraction == 1 else 6000
    found = [choose_rechecks(0, step, fraction, shares, ranks) for step in range(steps)]
    count = sum(map(len, found))
    assert count == pytest.approx(fraction * shares * steps, rel=0.1)
    for chosen in found:
        assert len({one.share for one in chosen}) == len(chosen)
        assert all(one.owner == (ranks * (one.share + 1) - 1) // shares for one in chosen)
        assert all((one.owner != one.checker) == (ranks > 1) for one in chosen)
        if shares % ranks == 0:
            assert len(set(Counter(one.checker for one in chosen).values())) <= 1, "all ranks do as much"


def test_all_pairs_of_ranks_check_each_other() -> None:
    pairs = {one[1:] for step in range(50) for one in choose_rechecks(0, step, 1, 4, 4)}
    assert len(pairs) == 12


@given(st.integers(1, 3 * TILE), st.integers(0, 2 * TILE), st.integers(0, 40), st.data())
def test_checksums_are_linear_and_add_up_over_parts(length: int, start: int, number: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(length)
    terms = [torch.from_numpy(rng.integers(-(1 << 27), 1 << 27, length, np.int32)) for _ in range(4)]
    total = torch.stack(terms).sum(0, dtype=torch.int32)
    cut = data.draw(st.integers(0, length))
    parts = checksum(total[:cut], number, start) + checksum(total[cut:], number, start + cut)
    each = sum(checksum(term, number, start) for term in terms)
    assert (each - parts) % MODULUS == (each - checksum(total, number, start)) % MODULUS == 0
    total[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert (checksum(total, number, start) - each) % MODULUS
