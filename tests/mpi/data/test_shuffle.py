"""The shuffle on real ranks, through shared memory and by messages: what is there stays there, once."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from unisono.data.memory.blocks import block_of, blocks_of
from unisono.data.memory.holding import at_first
from unisono.data.memory.shelf import Shelf
from unisono.data.memory.shuffle import shuffle
from unisono.data.memory.sliding import capacity
from unisono.data.pack.batches import Samples
from unisono.world import World

SAMPLES = 200
UNLIKE = [np.random.default_rng(number).bytes(31 * number % 97) for number in range(SAMPLES)]
ALIKE = [np.random.default_rng(number).bytes(30) for number in range(SAMPLES)]


@pytest.fixture(params=["alike", "unlike"])
def contents(request: pytest.FixtureRequest) -> list[bytes]:
    """The samples: of one length, or of many."""
    return ALIKE if request.param == "alike" else UNLIKE


def begin(world: World, contents: list[bytes], count: int, private: bool = False) -> Shelf:
    """A stretch for each rank, in `count` segments."""
    own = np.flatnonzero(at_first(SAMPLES, world.size) == world.rank).astype(np.int32)
    lengths = np.array([len(content) for content in contents], np.int32)
    blocks = int(blocks_of(lengths[own], block_of(lengths)).sum())
    samples, blocks = (max(sizes) for sizes in zip(*world.all_gather_object((len(own), blocks)), strict=True))
    room = capacity(samples, blocks, -(-samples // count))
    shelf = Shelf(world, lengths, room, shared=not private and world.nodes == 1 and world.size > 1)
    data = np.frombuffer(b"".join(contents[number] for number in own), np.uint8)
    ends = np.concatenate([[0], lengths[own].cumsum(dtype=np.int64)])
    shelf.fill(own, [Samples(data, ends)], np.arange(count + 1) * len(own) // count)
    return shelf


def check(shelf: Shelf, contents: list[bytes], holders: np.ndarray) -> None:
    """This rank holds what it is to hold, and nothing else, whole."""
    numbers = shelf.numbers.tolist()
    assert sorted(numbers) == np.flatnonzero(holders == shelf.world.rank).tolist()
    sums = [zlib.crc32(sample) for sample in shelf.samples(np.arange(len(numbers)))]
    assert sums == [zlib.crc32(contents[number]) for number in numbers]


@pytest.mark.parametrize("count", [1, 4])
def test_after_100_shuffles_every_sample_is_there_once(group: World, contents: list[bytes], count: int) -> None:
    shelf = begin(group, contents, count)
    for epoch in range(100):
        holders = np.random.default_rng(epoch).integers(0, group.size, SAMPLES).astype(np.int32)
        shuffle(shelf, holders)
        check(shelf, contents, holders)
    everywhere = group.all_gather_object(shelf.numbers.tolist())
    assert sorted(number for numbers in everywhere for number in numbers) == list(range(SAMPLES))
    shelf.free()


@pytest.mark.parametrize("count", [1, 3, SAMPLES])
def test_between_nodes(spread: World, contents: list[bytes], count: int) -> None:
    shelf = begin(spread, contents, count)
    for epoch in range(4 if count < SAMPLES else 1):
        holders = np.random.default_rng(epoch).integers(0, spread.size, SAMPLES).astype(np.int32)
        shuffle(shelf, holders)
        check(shelf, contents, holders)
    shelf.free()


@pytest.mark.parametrize("where", ["group", "spread"])
def test_all_to_one_rank_and_back(request: pytest.FixtureRequest, contents: list[bytes], where: str) -> None:
    world = request.getfixturevalue(where)
    shelf = begin(world, contents, 2)
    for holders in (np.full(SAMPLES, world.size - 1, np.int32), at_first(SAMPLES, world.size)) * 2:
        shuffle(shelf, holders)
        check(shelf, contents, holders)
    shelf.free()


def test_on_one_node_the_same_lies_at_the_same_rows_whichever_way_it_came(group: World, contents: list[bytes]) -> None:
    one, other = begin(group, contents, 3), begin(group, contents, 3, private=True)
    for epoch in range(5):
        holders = np.random.default_rng(epoch).integers(0, group.size, SAMPLES)
        for shelf in (one, other):
            shuffle(shelf, holders)
            check(shelf, contents, holders)
        assert one.numbers.tolist() == other.numbers.tolist()
    one.free()
    other.free()
