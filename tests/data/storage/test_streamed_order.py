"""The streamed order is a pure function, the same for any number of ranks. In one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import epoch_rng, share, steps_of
from unisono.data.pack.index import About, Index
from unisono.data.storage import streamed_order as module
from unisono.data.storage.streamed_order import (
    StripeBlocks,
    blocks_of_pack,
    line_of,
    own_blocks,
    steps_in_windows,
    streamed_order,
    windows_of,
)

SIZES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6)
"""Samples of each block of each stripe."""


def samples_of(blocks: StripeBlocks) -> int:
    return int((blocks.stops - blocks.firsts).sum())


def blocks_of(sizes: list[list[int]]) -> StripeBlocks:
    """Blocks of samples of one byte."""
    counts = np.array([count for stripe in sizes for count in stripe], np.int64)
    stripes = np.repeat(np.arange(len(sizes)), [len(stripe) for stripe in sizes])
    return StripeBlocks(counts.cumsum() - counts, counts.cumsum(), stripes, counts)


EVEN = blocks_of([[40] * 8] * 32)
"""32 stripes of 8 blocks of 40 samples."""


@given(SIZES, st.integers(1, 40), st.integers(1, 60), st.integers(0, 9))
def test_each_sample_once_an_epoch(sizes: list[list[int]], batch: int, window: int, epoch: int) -> None:
    blocks = blocks_of(sizes)
    order = streamed_order(blocks, batch, window, epoch_rng(3, epoch))
    assert sorted(order) == list(range(samples_of(blocks)))
    assert np.array_equal(order, streamed_order(blocks, batch, window, epoch_rng(3, epoch)))


@given(
    SIZES, st.integers(1, 40), st.integers(1, 60), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4)
)
def test_stopped_and_resumed_on_other_numbers_of_ranks_each_sample_is_used_once(
    sizes: list[list[int]], batch: int, window: int, legs: list[tuple[int, int]]
) -> None:
    """Each leg of a run has its number of ranks and of steps; the last one ends the epoch."""
    blocks, seen, step = blocks_of(sizes), list[int](), 0
    steps = steps_of(samples_of(blocks), batch)
    for ranks, count in [*legs, (3, steps)]:
        order = streamed_order(blocks, batch, window, epoch_rng(0, 0))  # each leg makes it anew
        last = min(steps, step + count)
        seen += [n for at in range(step, last) for rank in range(ranks) for n in share(order, batch, at, rank, ranks)]
        step = last
    assert sorted(seen) == list(range(samples_of(blocks)))


def test_samples_whose_random_keys_are_equal_keep_their_order() -> None:
    """So the order does not depend on how a processor sorts: numbers of a large pack may tie."""

    class Zeros(np.random.Generator):
        def random(self, *shape: Any) -> np.ndarray:
            return np.zeros(shape)

    order = streamed_order(EVEN, samples_of(EVEN), 32 * 40, Zeros(np.random.PCG64(0)))
    assert (np.diff(order.reshape(-1, 40)) == 1).all(), "block after block"


def naive_steps(sizes: list[int], batch: int, chance: list[float]) -> list[int]:
    """`steps_in_windows`, a sample after another."""
    steps, begin = list[int](), 0
    for size in sizes:
        positions = range(begin, begin + size)
        drawn = list[tuple[float, int]]()
        for step in sorted({position // batch for position in positions}):
            taken = [position for position in positions if position // batch == step]
            drawn += [((i + chance[position]) / len(taken), step) for i, position in enumerate(taken)]
        steps += [step for _, step in sorted(drawn, key=lambda pair: pair[0])]
        begin += size
    return steps


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 20), st.integers(0, 99))
def test_steps_are_dealt_as_one_by_one(sizes: list[int], batch: int, seed: int) -> None:
    chance = np.random.default_rng(seed).random(sum(sizes))
    steps = steps_in_windows(np.array(sizes, np.int64), batch, chance).tolist()
    assert steps == naive_steps(sizes, batch, chance.tolist())


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 9))
def test_neighbours_on_the_line_are_in_different_windows(blocks: int, windows: int, seed: int) -> None:
    drawn = windows_of(blocks, windows, np.random.default_rng(seed))
    assert len(drawn) == blocks
    for begin in range(0, blocks, windows):
        group = drawn[begin : begin + windows]
        assert len(set(group.tolist())) == len(group)
    assert set(drawn.tolist()) <= set(range(windows))


def test_a_line_has_stripes_in_any_order_and_each_in_one_piece() -> None:
    lines = [line_of(EVEN.stripes, epoch_rng(0, epoch)) for epoch in range(40)]
    for line in lines:
        assert sorted(line) == list(range(256))
        assert np.count_nonzero(np.diff(EVEN.stripes[line])) == 31
    assert len({tuple(line) for line in lines}) == 40
    assert len({int(EVEN.stripes[line[0]]) for line in lines}) > 15


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batch", [32, 100])
def test_a_rank_reads_few_stripes_and_few_blocks_twice(ranks: int, batch: int) -> None:
    """Windows of 32 blocks. At the ends of a rank's part of the line lie blocks that it shares with its neighbours."""
    order = streamed_order(EVEN, batch, 32 * 40, epoch_rng(0, 1))
    steps = range(steps_of(samples_of(EVEN), batch))
    read = [
        np.unique(EVEN.find(np.concatenate([share(order, batch, step, rank, ranks) for step in steps])))
        for rank in range(ranks)
    ]
    assert max(len(np.unique(EVEN.stripes[blocks])) for blocks in read) <= 32 // ranks + 3
    assert sum(map(len, read)) <= 256 + 8 * 3 * (ranks - 1)
    permuted = epoch_rng(0, 1).permutation(samples_of(EVEN))
    assert len(np.unique(EVEN.find(share(permuted, batch, 0, 0, ranks)))) > 32 // ranks - 5, "as a permutation reads"


def test_any_block_may_come_first_and_epochs_and_seeds_differ() -> None:
    orders = [streamed_order(EVEN, 64, 1280, epoch_rng(seed, epoch)) for seed in range(4) for epoch in range(20)]
    assert len({tuple(order[:20]) for order in orders}) == 80
    windows = np.array([np.argsort(order)[0] // 1280 for order in orders])
    assert set(windows.tolist()) == set(range(8)), "the first sample is in any window"


def test_a_step_has_samples_of_all_its_window() -> None:
    """Sorted by class, one class a stripe: a step of 128 has nearly as many samples of each of four classes."""
    order = streamed_order(EVEN, 128, 32 * 40, epoch_rng(5, 0))
    classes = EVEN.stripes[EVEN.find(order)] // 8
    for step in range(80):
        counts = np.bincount(classes[step * 128 : (step + 1) * 128], minlength=4)
        assert (np.abs(counts - 32) <= 8).all()


def test_the_worked_example() -> None:
    blocks = blocks_of([[4, 4, 4]] * 4)
    order = streamed_order(blocks, 8, 16, epoch_rng(0, 0))
    text = (module.__doc__ or "").split("Worked example")[1]
    rows = [line for line in text.splitlines() if line.strip().startswith("step ")]
    assert len(rows) == 6
    for step, row in enumerate(rows):
        written = [int(word) for word in row.replace("rank 0", "").split()[2:] if word.isdigit()]
        for rank in range(1, 4):
            if f"rank {rank}" in row:
                written.remove(rank)
        assert written == order[8 * step : 8 * step + 8].tolist()


@given(SIZES, st.integers(1, 9), st.integers(0, 9))
def test_ranks_out_of_step_own_each_sample_once(sizes: list[list[int]], ranks: int, seed: int) -> None:
    blocks = blocks_of(sizes)
    order = np.random.default_rng(seed).permutation(samples_of(blocks))
    owned = list[int]()
    for rank in range(ranks):
        own = own_blocks(blocks, order, rank, ranks)
        assert abs(samples_of(own) - samples_of(blocks) / ranks) < 1
        assert (np.diff(own.firsts) > 0).all()
        assert own.nbytes.sum() == samples_of(own), "samples of a byte"
        numbers = streamed_order(own, 4, 8, np.random.default_rng(0))
        assert np.array_equal(own.stripes[own.find(numbers)], blocks.stripes[blocks.find(numbers)])
        owned += numbers.tolist()
    assert sorted(owned) == list(range(samples_of(blocks)))


def test_blocks_are_the_record_batches_of_a_pack() -> None:
    stripe = np.repeat([0, 0, 1, 3], [4, 2, 3, 1]).astype(np.int32)
    batch = np.repeat([0, 1, 1, 0], [4, 2, 3, 1]).astype(np.int32)
    length = np.arange(10, dtype=np.int32)
    blocks = blocks_of_pack(Index(About("raw", ("one",)), stripe, batch, batch, length, batch))
    assert [column.tolist() for column in blocks] == [[0, 4, 6, 9], [4, 6, 9, 10], [0, 0, 1, 3], [6, 9, 21, 9]]
    assert blocks.find(np.arange(10)).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]


def test_an_empty_pack_has_no_blocks() -> None:
    none = np.empty(0, np.int32)
    blocks = blocks_of_pack(Index(About("raw", ("one",)), none, none, none, none, none))
    assert samples_of(blocks) == 0
    assert streamed_order(blocks, 4, 8, epoch_rng(0, 0)).tolist() == []
