"""In one process; tests/mpi/test_shuffle.py has shelves that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono.data.memory.segment import Segment
from unisono.data.memory.shelf import Shelf
from unisono.data.memory.shuffle import shuffle
from unisono.data.pack.batches import Samples

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def segment_of(first: int, contents: list[bytes]) -> Segment:
    ends = np.cumsum([0, *map(len, contents)])
    return Segment.of(first, [Samples(np.frombuffer(b"".join(contents), np.uint8), ends)])


@pytest.mark.parametrize("contents", [[b"a", b"", b"bcd", b"ef"], [b"ab", b"cd", b"ef", b"gh"]])
def test_each_takes_what_is_laid_out_for_it(on_ranks: OnRanks, contents: list[bytes]) -> None:
    to = np.array([1, 0, 2, 1])
    lengths = np.array([len(content) for content in contents] * 3, np.int32)

    def work(world: Any) -> list[tuple[int, bytes]]:
        shelf = Shelf(world, 4, 8)
        shelf.lay_out(segment_of(4 * world.rank, contents), to)
        taken = shelf.take(np.empty(100, np.uint8), lengths)
        shelf.free()
        return [(int(number), taken.sample(row).tobytes()) for row, number in enumerate(taken.numbers)]

    for rank, found in enumerate(on_ranks(3, work)):
        rows = np.flatnonzero(to == rank).tolist()
        assert found == [(4 * giver + row, contents[row]) for giver in range(3) for row in rows], "in order of givers"


def test_what_comes_lies_in_the_room_where_it_is_large_enough(on_ranks: OnRanks) -> None:
    def work(world: Any) -> None:
        shelf = Shelf(world, 3, 9)
        for room in (np.empty(9, np.uint8), np.empty(8, np.uint8)):
            shelf.lay_out(segment_of(0, [b"abcd", b"ef", b"ghi"]), np.zeros(3, np.int32))
            taken = shelf.take(room, np.array([4, 2, 3], np.int32))
            assert taken.data[:9].tobytes() == b"abcdefghi"
            assert np.shares_memory(taken.data, room) == (len(room) == 9)

    on_ranks(1, work)


def test_a_shelf_serves_until_it_is_too_small(on_ranks: OnRanks) -> None:
    def work(world: Any) -> None:
        holders, lengths = np.zeros(100, np.int32), np.full(100, 6, np.int32)
        small, large = ([segment_of(0, [bytes([number] * 6) for number in range(count)])] for count in (10, 100))
        shelf = shuffle(world, small, holders, lengths)
        assert shuffle(world, small, holders, lengths, shelf) is shelf
        other = shuffle(world, large, holders, lengths, shelf)
        assert other is not shelf
        assert [large[0].sample(row).tobytes() for row in range(100)] == [bytes([number] * 6) for number in range(100)]
        assert shuffle(world, small, holders, lengths, other) is other

        heavy, many = [segment_of(0, [bytes(600)])], [segment_of(0, [b"a"] * 100)]
        shelf = shuffle(world, heavy, holders, np.full(1, 600, np.int32))
        assert shuffle(world, many, holders, np.ones(100, np.int32), shelf) is not shelf
        assert many[0].data[:100].tobytes() == b"a" * 100

    on_ranks(1, work)
