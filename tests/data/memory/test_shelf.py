from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono.data.memory import room
from unisono.data.memory.shelf import Place, Shelf
from unisono.data.pack.batches import Samples
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

UNLIKE, ALIKE = [b"a", b"", b"bcd" * 4, b"ef"], [b"ab", b"cd", b"ef", b"gh"]


def shelf_of(
    world: Any, contents: list[bytes], first: int = 0, room: tuple[int, int] = (20, 30), begins: tuple[int, ...] = (0,)
) -> Shelf:
    """A shelf with these samples, whose numbers follow `first`; all ranks' samples have these lengths."""
    lengths = np.array([len(content) for content in contents] * max(1, world.size), np.int32)
    shelf = Shelf(world, lengths, room, shared=world.nodes == 1 and world.size > 1)
    ends = np.cumsum([0, *map(len, contents)])
    numbers = np.arange(first, first + len(contents), dtype=np.int32)
    shelf.fill(
        numbers, [Samples(np.frombuffer(b"".join(contents), np.uint8), ends)], np.array([*begins, len(contents)])
    )
    return shelf


def held(shelf: Shelf) -> list[bytes]:
    return [sample.tobytes() for sample in shelf.samples(np.arange(len(shelf.numbers), dtype=np.int32))]


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE, [b"", b""], []])
def test_it_holds_what_it_is_filled_with(on_ranks: OnRanks, contents: list[bytes]) -> None:
    def work(world: Any) -> None:
        shelf = shelf_of(world, contents)
        assert held(shelf) == contents
        assert shelf.numbers.tolist() == list(range(len(contents)))
        assert shelf.numbers.dtype == np.int32
        assert shelf.nbytes == sum(map(len, contents))
        shelf.free()
        assert (held(shelf), shelf.nbytes, len(shelf.numbers)) == ([], 0, 0)

    on_ranks(1, work)


def test_samples_lie_where_they_are_given(on_ranks: OnRanks) -> None:
    def work(world: Any) -> None:
        for contents in (UNLIKE, ALIKE):
            shelf = shelf_of(world, contents)
            samples = shelf.samples(np.array([2, 0]))
            assert [sample.tobytes() for sample in samples] == [contents[2], contents[0]]
            assert all(np.shares_memory(sample, shelf.own.blocks) for sample in samples)

    on_ranks(1, work)


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE])
@pytest.mark.parametrize("part", [1, 1 << 20])
def test_a_segment_is_laid_out_by_rank_in_the_order_in_which_it_lies(
    on_ranks: OnRanks, contents: list[bytes], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.data.memory.shelf.PART", part)
    to = np.array([1, 0, 2, 1])

    def work(world: Any) -> None:
        shelf = shelf_of(world, [b"no" if contents is ALIKE else b"before", *contents], begins=(0, 1))
        places = [Place(np.full(6, -1, np.int32), np.full((9, shelf.block), 7, np.uint8)) for _ in range(3)]
        begins = np.array([[0, 0], [1, 2], [3, 5]])
        shelf.lay(1, to, places, begins)
        for rank, (numbers, blocks) in enumerate(places):
            (row, block), rows = begins[rank], np.flatnonzero(to == rank)
            assert numbers.tolist() == [-1] * row + (1 + rows).tolist() + [-1] * (6 - row - len(rows))
            assert (blocks[:block] == 7).all()
            for content in (contents[each] for each in rows):
                assert blocks[block:].tobytes()[: len(content)] == content
                block += -(-len(content) // shelf.block)
            assert (blocks[block:] == 7).all()

    on_ranks(1, work)


@pytest.mark.parametrize("contents", [UNLIKE, ALIKE])
def test_what_grows_keeps_what_it_holds_at_the_end_where_it_lies(anywhere: OnRanks, contents: list[bytes]) -> None:
    def work(world: Any) -> None:
        shelf = shelf_of(world, contents, 4 * world.rank, (6, 12), (0, 3))
        cuts = shelf.cuts
        shelf.grow(np.array([5, 7]))
        assert shelf.room.tolist() == [11, 19]
        assert shelf.cuts.tolist() == cuts.tolist()
        assert held(shelf) == contents
        shelf.hold(shelf.cuts, low=False)
        shelf.grow(np.array([1, 2]))
        assert shelf.room.tolist() == [12, 21]
        assert shelf.cuts.tolist() == (cuts + np.array([1, 2])).tolist()
        assert held(shelf) == contents
        assert shelf.numbers.tolist() == list(range(4 * world.rank, 4 * world.rank + 4))
        assert [len(place.blocks) for place in shelf.places] == [21] * (world.size if shelf.shared else 1)
        shelf.free()

    anywhere(3, work)


def test_it_does_not_grow_beyond_what_the_node_has(anywhere: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda shared: 1000)

    def work(world: Any) -> None:
        shelf = shelf_of(world, ALIKE)
        with pytest.raises(PackError, match="node 0 has"):
            shelf.grow(np.array([0, 1000]))
        assert held(shelf) == ALIKE

    anywhere(2, work)
