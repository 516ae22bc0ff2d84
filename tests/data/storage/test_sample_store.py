from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import joined_ranges
from unisono.data.pack.stripe import EncodedSamples
from unisono.data.storage import free_memory
from unisono.data.storage.sample_store import (
    BLOCKS_PER_SAMPLE,
    MAX_BLOCK_BYTES,
    MAX_RANKS_BY_PASSES,
    MIN_BLOCK_BYTES,
    SampleBuffer,
    SampleStore,
    block_of,
    blocks_of,
    rows_for,
)
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

UNLIKE, ALIKE = [b"a", b"", b"bcd" * 4, b"ef"], [b"ab", b"cd", b"ef", b"gh"]


def store_of(
    world: Any, contents: list[bytes], first: int = 0, room: tuple[int, int] = (20, 30), begins: tuple[int, ...] = (0,)
) -> SampleStore:
    """A store with these samples, whose numbers follow `first`; all ranks' samples have these lengths."""
    lengths = np.array([len(content) for content in contents] * max(1, world.size), np.int32)
    store = SampleStore(world, lengths, room, shared=world.nodes == 1 and world.size > 1)
    ends = np.cumsum([0, *map(len, contents)])
    numbers = np.arange(first, first + len(contents), dtype=np.int32)
    store.fill(
        numbers, [EncodedSamples(np.frombuffer(b"".join(contents), np.uint8), ends)], np.array([*begins, len(contents)])
    )
    return store


def held(store: SampleStore) -> list[bytes]:
    return [sample.tobytes() for sample in store.samples(np.arange(len(store.numbers), dtype=np.int32))]


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE, [b"", b""], []])
def test_it_returns_the_samples_it_was_filled_with(on_ranks: OnRanks, contents: list[bytes]) -> None:
    def work(world: Any) -> None:
        store = store_of(world, contents)
        assert held(store) == contents
        assert store.numbers.tolist() == list(range(len(contents)))
        assert store.numbers.dtype == np.int32
        assert store.nbytes == sum(map(len, contents))
        store.free()
        assert (held(store), store.nbytes, len(store.numbers)) == ([], 0, 0)

    on_ranks(1, work)


def test_samples_lie_where_they_are_given(on_ranks: OnRanks) -> None:
    def work(world: Any) -> None:
        for contents in (UNLIKE, ALIKE):
            store = store_of(world, contents)
            samples = store.samples(np.array([2, 0]))
            assert [sample.tobytes() for sample in samples] == [contents[2], contents[0]]
            assert all(np.shares_memory(sample, store.own.blocks) for sample in samples)

    on_ranks(1, work)


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE])
@pytest.mark.parametrize("part", [1, 1 << 20])
def test_a_segment_is_copied_by_rank_in_order(
    on_ranks: OnRanks, contents: list[bytes], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.data.storage.sample_store.COPY_BYTES", part)
    to = np.array([1, 0, 2, 1])

    def work(world: Any) -> None:
        store = store_of(world, [b"no" if contents is ALIKE else b"before", *contents], begins=(0, 1))
        places = [SampleBuffer(np.full(6, -1, np.int32), np.full((9, store.block), 7, np.uint8)) for _ in range(3)]
        begins = np.array([[0, 0], [1, 2], [3, 5]])
        store.copy_segment(1, to, places, begins)
        for rank, (numbers, blocks) in enumerate(places):
            (row, block), rows = begins[rank], np.flatnonzero(to == rank)
            assert numbers.tolist() == [-1] * row + (1 + rows).tolist() + [-1] * (6 - row - len(rows))
            assert (blocks[:block] == 7).all()
            for content in (contents[each] for each in rows):
                assert blocks[block:].tobytes()[: len(content)] == content
                block += -(-len(content) // store.block)
            assert (blocks[block:] == 7).all()

    on_ranks(1, work)


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE])
def test_growth_keeps_samples_at_their_end(anywhere: OnRanks, contents: list[bytes]) -> None:
    def work(world: Any) -> None:
        store = store_of(world, contents, 4 * world.rank, (6, 12), (0, 3))
        cuts = store.cuts
        store.grow(np.array([5, 7]))
        assert store.capacity.tolist() == [11, 19]
        assert store.cuts.tolist() == cuts.tolist()
        assert held(store) == contents
        store.set_segments(store.cuts, at_start=False)
        store.grow(np.array([1, 2]))
        assert store.capacity.tolist() == [12, 21]
        assert store.cuts.tolist() == (cuts + np.array([1, 2])).tolist()
        assert held(store) == contents
        assert store.numbers.tolist() == list(range(4 * world.rank, 4 * world.rank + 4))
        assert [len(place.blocks) for place in store.buffers] == [21] * (world.size if store.shared else 1)
        store.free()

    anywhere(3, work)


def test_it_does_not_grow_beyond_what_the_node_has(anywhere: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: 1000)

    def work(world: Any) -> None:
        store = store_of(world, ALIKE)
        with pytest.raises(PackError, match="node 0 has"):
            store.grow(np.array([0, 1000]))
        assert held(store) == ALIKE

    anywhere(2, work)


def test_the_example_of_rows_by_rank() -> None:
    assert [rows.tolist() for rows in rows_for(np.array([1, 0, 2, 1, 0], np.uint8), 3)] == [[1, 4], [0, 3], [2]]


@given(
    st.integers(1, 3 * MAX_RANKS_BY_PASSES).flatmap(
        lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, ranks - 1), max_size=200))
    ),
    st.sampled_from([np.uint8, np.uint16, np.int32]),
)
def test_rows_equal_a_search_for_each_rank(dealt: tuple[int, list[int]], kind: type) -> None:
    ranks, to = dealt
    wanted = [[row for row, other in enumerate(to) if other == rank] for rank in range(ranks)]
    assert [rows.tolist() for rows in rows_for(np.array(to, kind), ranks)] == wanted


def test_many_rows_stay_in_order() -> None:
    for ranks in (MAX_RANKS_BY_PASSES, MAX_RANKS_BY_PASSES + 1, 300):
        to = np.random.default_rng(0).integers(0, ranks, 5000).astype(np.uint16)
        rows = rows_for(to, ranks)
        assert all((np.diff(own) > 0).all() for own in rows)
        assert all((to[own] == rank).all() for rank, own in enumerate(rows))
        assert sum(map(len, rows)) == len(to)


def test_the_example_of_blocks() -> None:
    lengths = np.array([6, 3, 9], np.int32)
    sizes = blocks_of(lengths, 4)
    assert sizes.tolist() == [2, 1, 3]
    table = np.frombuffer(b"aaaaaa..bbb.ccccccccc...", np.uint8).reshape(-1, 4)
    blocks = joined_ranges(np.array([3, 0]), sizes[[2, 0]])
    assert blocks.tolist() == [3, 4, 5, 0, 1]
    assert table.take(blocks, 0).tobytes() == b"ccccccccc...aaaaaa.."


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_a_sample_fits_its_blocks_and_little_is_lost(lengths: list[int]) -> None:
    known = np.array(lengths, np.int32)
    block = block_of(known)
    for length, blocks in zip(lengths, blocks_of(known, block).tolist(), strict=True):
        assert (blocks - 1) * block < length <= blocks * block
    if len({*lengths}) == 1 and lengths[0]:
        assert block == lengths[0]
    else:
        assert block in range(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, MIN_BLOCK_BYTES)
        assert block == MIN_BLOCK_BYTES or block * BLOCKS_PER_SAMPLE <= sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    ("lengths", "block"), [([], 8), ([0, 0], 8), ([99, 100], 8), ([900, 940], 64), ([100_000, 200_000], 512)]
)
def test_blocks_of_unlike_lengths_are_a_multiple_of_8(lengths: list[int], block: int) -> None:
    assert block_of(np.array(lengths, np.int32)) == block
