"""In one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.memory.blocks import block_of, blocks_of
from unisono.data.memory.shelf import Shelf
from unisono.data.memory.shuffle import shuffle
from unisono.data.pack.batches import Samples

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def shelf_of(world: Any, segments: list[list[int]], contents: list[bytes], room: tuple[int, int]) -> Shelf:
    """A shelf with samples of these numbers in each segment; with so much room, or as much as they take."""
    lengths = np.array([len(content) for content in contents], np.int32)
    numbers = [number for segment in segments for number in segment]
    blocks = blocks_of(lengths[numbers], block_of(lengths)).sum(dtype=int)
    rows, blocks = np.max(world.all_gather_object((room, (len(numbers), blocks))), axis=(0, 1)).tolist()
    shelf = Shelf(world, lengths, (rows, blocks), shared=world.nodes == 1 and world.size > 1)
    data = np.frombuffer(b"".join(contents[number] for number in numbers), np.uint8)
    ends = np.concatenate([[0], lengths[numbers].cumsum(dtype=np.int64)])
    cuts = np.cumsum([0, *(len(segment) for segment in segments)])
    shelf.fill(np.array(numbers, np.int32), [Samples(data, ends)], cuts)
    return shelf


def held_on(shelf: Shelf) -> dict[int, bytes]:
    numbers = shelf.numbers.tolist()
    found = [sample.tobytes() for sample in shelf.samples(np.arange(len(numbers)))]
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
def test_every_sample_comes_to_the_rank_that_is_to_hold_it(
    anywhere: OnRanks, ranks: int, contents: list[bytes], count: int, room: tuple[int, int], seed: int
) -> None:
    dice = np.random.default_rng(seed)
    begin = dice.integers(0, ranks * count, len(contents))  # the rank and the segment in which each begins
    rounds = [dice.integers(0, ranks, len(contents)) for _ in range(3)]

    def work(world: Any) -> list[dict[int, bytes]]:
        segments = [np.flatnonzero(begin == world.rank * count + number).tolist() for number in range(count)]
        shelf, held = shelf_of(world, segments, contents, room), []
        for holders in rounds:
            shuffle(shelf, holders)
            held.append(held_on(shelf))
        shelf.free()
        return held

    for rank, held in enumerate(anywhere(ranks, work)):
        for holders, found in zip(rounds, held, strict=True):
            assert found == {number: contents[number] for number in np.flatnonzero(holders == rank).tolist()}


def test_what_comes_lies_in_the_order_of_who_gave_it_and_of_where_it_lay(anywhere: OnRanks) -> None:
    contents = [bytes([number]) * (7 * (number % 4)) for number in range(40)]
    holders = np.random.default_rng(0).integers(0, 4, 40)

    def work(world: Any) -> list[list[int]]:
        first = 10 * world.rank
        shelf = shelf_of(world, [list(range(first, first + 6)), list(range(first + 6, first + 10))], contents, (20, 40))
        shuffle(shelf, holders)
        rows = shelf.cuts[:, 0] - shelf.cuts[0, 0]
        return [shelf.numbers[rows[segment] : rows[segment + 1]].tolist() for segment in (0, 1)]

    for rank, segments in enumerate(anywhere(4, work)):
        wanted = [number for number in range(40) if holders[number] == rank]
        assert segments == [[n for n in wanted if n % 10 < 6], [n for n in wanted if n % 10 >= 6]]


def test_a_shelf_grows_when_all_comes_to_one_rank_and_only_then(anywhere: OnRanks) -> None:
    contents = [bytes([number]) * (7 * (number % 4)) for number in range(40)]

    def work(world: Any) -> list[int]:
        shelf, rooms = shelf_of(world, [list(range(10 * world.rank, 10 * world.rank + 10))], contents, (25, 50)), []
        for holders in (np.arange(40) % 4, np.full(40, 3), np.arange(40) % 4, np.full(40, 3)):
            shuffle(shelf, holders)
            assert sorted(held_on(shelf)) == np.flatnonzero(holders == world.rank).tolist()
            rooms.append(int(shelf.room[0]))
        shelf.free()
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
        shuffle(shelf_of(world, segments, contents, (30, 300)), np.arange(64) % 4)
        return most

    most = on_ranks(4, work)
    assert most == [40 if length else 64] * 4, "blocks of 10, or 2 of 8, for each sample"
