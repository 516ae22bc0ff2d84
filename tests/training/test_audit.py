"""Which shares are computed again, and checksums of integers whose sums are checked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from unisono.data.loading import Batch
from unisono.training.audit import _packed, _unpacked, choose_rechecks, words
from unisono.transports.exact import checksum


@pytest.mark.parametrize(("shares", "ranks"), [(8, 1), (8, 2), (8, 3), (12, 4)])
@pytest.mark.parametrize("fraction", [0.1, 0.3, 1.0])
def test_the_fraction_of_all_shares_is_computed_again(shares: int, ranks: int, fraction: float) -> None:
    steps = 1 if fraction == 1 else 6000
    chosen_of_steps = [choose_rechecks(0, step, fraction, shares, ranks) for step in range(steps)]
    count = sum(map(len, chosen_of_steps))
    assert count == pytest.approx(fraction * shares * steps, rel=0.1)
    for chosen in chosen_of_steps:
        assert len({recheck.share for recheck in chosen}) == len(chosen)
        assert all(recheck.owner == (ranks * (recheck.share + 1) - 1) // shares for recheck in chosen)
        assert all((recheck.owner != recheck.checker) == (ranks > 1) for recheck in chosen)
        if shares % ranks == 0:
            assert len(set(Counter(recheck.checker for recheck in chosen).values())) <= 1, "all ranks do as much"


def test_all_pairs_of_ranks_check_each_other() -> None:
    pairs = {recheck[1:] for step in range(50) for recheck in choose_rechecks(0, step, 1, 4, 4)}
    assert len(pairs) == 12


def test_a_step_that_computes_nothing_again_makes_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = np.random.default_rng, list[tuple[int, ...]]()
    monkeypatch.setattr(np.random, "default_rng", lambda key: (made.append(key), make(key))[1])
    assert not any(choose_rechecks(1234, step, 1e-9, 8, 2) for step in range(100))
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_bits_of_numbers_are_in_their_words(dtype: torch.dtype) -> None:
    numbers = torch.randn(6).to(dtype)
    before = checksum(words(numbers), 0, 0)
    assert checksum(words(-numbers), 0, 0) != before, "all signs of numbers of 8 bytes"
    numbers.view(torch.uint8)[0] ^= 1
    assert checksum(words(numbers), 0, 0) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_samples_are_sent_in_the_order_of_their_memory(dtype: torch.dtype) -> None:
    images = torch.arange(240).view(4, 3, 5, 4).to(dtype, memory_format=torch.channels_last)
    given: Batch = images[1:3], torch.tensor([7, 9, 1, 2])[1:3]
    packed = _packed(given)
    assert len(packed[0][-1]) == 120 * dtype.itemsize, "the part alone"
    for before, after in zip(given, _unpacked(packed), strict=True):
        assert (before.dtype, before.stride()) == (after.dtype, after.stride())
        assert before.equal(after)
