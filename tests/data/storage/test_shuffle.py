"""In one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.pack.batches import EncodedSamples
from unisono.data.storage.blocks import block_of, blocks_of
from unisono.data.storage.sample_store import SampleStore
from unisono.data.storage.shuffle import shuffle

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def store_of(world: Any, segments: list[list[int]], contents: list[bytes], room: tuple[int, int]) -> SampleStore:
    """A store with samples of these numbers in each segment; with so much room, or as much as they take."""
    lengths = np.array([len(content) for content in contents], np.int32)
    numbers = [number for segment in segments for number in segment]
    blocks = blocks_of(lengths[numbers], block_of(lengths)).sum(dtype=int)
    rows, blocks = np.max(world.all_gather_object((room, (len(numbers), blocks))), axis=(0, 1)).tolist()
    store = SampleStore(world, lengths, (rows, blocks), shared=world.nodes == 1 and world.size > 1)
    data = np.frombuffer(b"".join(contents[number] for number in numbers), np.uint8)
    ends = np.concatenate([[0], lengths[numbers].cumsum(dtype=np.int64)])
    cuts = np.cumsum([0, *(len(segment) for segment in segments)])
    store.fill(np.array(numbers, np.int32), [EncodedSamples(data, ends)], cuts)
    return store


def held_on(store: SampleStore) -> dict[int, bytes]:
    numbers = store.numbers.tolist()
    found = [sample.tobytes() for sample in store.samples(np.arange(len(numbers)))]
    assert len(set(numbers)) == len(numbers), "no sample is there twice"
    return dict(zip(numbers, found, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.one_of(st.lists(st.binary(max_size=40), max_size=60), st.lists(st.binary(min_size=5, max_size=5), max_size=60)),
    st.integers(1, 6),
    st.tuples(st.integers(1, 80), st.integers(1, 300)),
    st.integers(0, 999),
)
def test_every_sample_moves_to_its_owner(
    anywhere: OnRanks, ranks: int, contents: list[bytes], count: int, room: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, ranks * count, len(contents))  # the rank and the segment in which each begins
    rounds = [rng.integers(0, ranks, len(contents)) for _ in range(3)]

    def work(world: Any) -> list[dict[int, bytes]]:
        segments = [np.flatnonzero(begin == world.rank * count + number).tolist() for number in range(count)]
        store, held = store_of(world, segments, contents, room), []
        for owners in rounds:
            shuffle(store, owners)
            held.append(held_on(store))
        store.free()
        return held

    for rank, held in enumerate(anywhere(ranks, work)):
        for owners, found in zip(rounds, held, strict=True):
            assert found == {number: contents[number] for number in np.flatnonzero(owners == rank).tolist()}


def test_received_samples_are_in_the_order_of_senders_and_rows(anywhere: OnRanks) -> None:
    contents = [bytes([number]) * (7 * (number % 4)) for number in range(40)]
    owners = np.random.default_rng(0).integers(0, 4, 40)

    def work(world: Any) -> list[list[int]]:
        first = 10 * world.rank
        store = store_of(world, [list(range(first, first + 6)), list(range(first + 6, first + 10))], contents, (20, 40))
        shuffle(store, owners)
        rows = store.cuts[:, 0] - store.cuts[0, 0]
        return [store.numbers[rows[segment] : rows[segment + 1]].tolist() for segment in (0, 1)]

    for rank, segments in enumerate(anywhere(4, work)):
        wanted = [number for number in range(40) if owners[number] == rank]
        assert segments == [[n for n in wanted if n % 10 < 6], [n for n in wanted if n % 10 >= 6]]


def test_a_store_grows_only_when_one_rank_receives_all(anywhere: OnRanks) -> None:
    contents = [bytes([number]) * (7 * (number % 4)) for number in range(40)]

    def work(world: Any) -> list[int]:
        store, rooms = store_of(world, [list(range(10 * world.rank, 10 * world.rank + 10))], contents, (25, 50)), []
        for owners in (np.arange(40) % 4, np.full(40, 3), np.arange(40) % 4, np.full(40, 3)):
            shuffle(store, owners)
            assert sorted(held_on(store)) == np.flatnonzero(owners == world.rank).tolist()
            rooms.append(int(store.capacity[0]))
        store.free()
        return rooms

    for before, first, again, second in anywhere(4, work):
        assert before == 25 < first == again == second


@pytest.mark.parametrize("length", [10, 0])
def test_a_segment_is_all_that_is_exchanged_at_once(on_ranks: OnRanks, length: int) -> None:
    contents = [bytes([number] * (length or 9 + number % 3)) for number in range(64)]

    def work(world: Any) -> int:
        most = 0
        exchange = world.all_to_all_v

        def counted(sends: list[Any], receives: list[Any]) -> None:
            nonlocal most
            most = max(most, sum(part.nbytes for part in sends))
            exchange(sends, receives)

        world.all_to_all_v = counted
        first = 16 * world.rank
        segments = [list(range(at, at + 4)) for at in range(first, first + 16, 4)]
        shuffle(store_of(world, segments, contents, (30, 300)), np.arange(64) % 4)
        return most

    most = on_ranks(4, work)
    assert most == [40 if length else 64] * 4, "blocks of 10, or 2 of 8, for each sample"
