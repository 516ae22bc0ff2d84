"""Plans of reads are functions of the order. In one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import epoch_rng, share, steps_of
from unisono.data.storage.read_plan import VIEW_BYTES, memory_limit, plan_reads, reads_that_fit, seen_by
from unisono.data.storage.streamed_order import StripeBlocks, streamed_order


def even_blocks(blocks: int, samples: int, nbytes: int) -> StripeBlocks:
    firsts = np.arange(blocks) * samples
    return StripeBlocks(firsts, firsts + samples, np.arange(blocks) // 4, np.full(blocks, nbytes))


@given(st.integers(1, 200), st.integers(1, 30), st.integers(0, 8), st.integers(1, 9))
def test_a_rank_sees_its_shares(samples: int, batch: int, done: int, ranks: int) -> None:
    order = epoch_rng(0, 0).permutation(samples)
    for rank in range(ranks):
        steps = range(done, steps_of(samples, batch))
        expected = [number for step in steps for number in share(order, batch, step, rank, ranks)]
        assert seen_by(order, batch, done, rank, ranks).tolist() == expected


NONE = np.zeros(10, np.bool_)


def test_blocks_in_the_cache_take_the_memory_of_views_in_a_plan() -> None:
    cached = NONE.copy()
    cached[1] = True
    plan = plan_reads(even_blocks(10, 4, 7), np.array([5, 9, 6]), cached)
    assert plan.blocks.tolist() == [1, 2]
    assert plan.nbytes.tolist() == [4 * VIEW_BYTES, 7]


@given(st.lists(st.integers(0, 39), max_size=60))
def test_blocks_in_the_order_of_their_first_use(seen: list[int]) -> None:
    blocks = even_blocks(10, 4, 7)
    plan = plan_reads(blocks, np.array(seen, np.int64), NONE)
    expected = dict[int, int]()
    for number in seen:
        expected[number // 4] = expected.get(number // 4, 0) + 1
    assert list(zip(plan.blocks.tolist(), plan.uses.tolist(), strict=True)) == list(expected.items())
    assert plan.nbytes.tolist() == [7] * len(expected)


@pytest.mark.parametrize(
    ("begun", "held", "limit", "expected"), [(0, 0, 12, 3), (1, 4, 12, 3), (1, 4, 3, 1), (2, 9, 12, 2), (4, 4, 99, 4)]
)
def test_reads_that_fit(begun: int, held: int, limit: int, expected: int) -> None:
    assert reads_that_fit(np.full(4, 4), begun, held, limit) == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 9))
def test_within_the_limit_each_window_is_there_before_it_is_used(ranks: int, window: int, epoch: int) -> None:
    """Reads that are as fast as told: played step by step, a step never begins a read that it needs."""
    blocks, batch = even_blocks(48, 20, 100), 10
    order = streamed_order(blocks, batch, window * 100, epoch_rng(1, epoch))
    limit = memory_limit(blocks, window * 100, ranks)
    for rank in range(ranks):
        plan = plan_reads(blocks, seen_by(order, batch, 0, rank, ranks), np.zeros(len(blocks.firsts), np.bool_))
        turns = {block: turn for turn, block in enumerate(plan.blocks.tolist())}
        left, begun, held = plan.uses.copy(), 0, 0
        for step in range(steps_of(len(order), batch)):
            fits = reads_that_fit(plan.nbytes, begun, held, limit)
            held += int(plan.nbytes[begun:fits].sum())
            begun = max(begun, fits)
            assert held <= limit
            for block in blocks.find(share(order, batch, step, rank, ranks)).tolist():
                assert turns[block] < begun, "it was read ahead"
                left[turns[block]] -= 1
                held -= 100 * (left[turns[block]] == 0)
        assert not left.any()
        assert held == 0


def test_a_rank_needs_its_part_of_two_windows() -> None:
    blocks = even_blocks(1000, 40, 4 << 20)
    assert memory_limit(blocks, 1 << 30, 4) == 2 * ((256 << 20) + (8 << 20))
    assert memory_limit(even_blocks(3, 4, 5), 1 << 30, 4) == 15, "no more than the pack"
