"""The shuffle on real ranks, through shared memory and by messages: what is there stays there, once."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from unisono.data.memory.holding import at_first
from unisono.data.memory.segment import Segment
from unisono.data.memory.shuffle import shuffle
from unisono.data.pack.batches import Samples
from unisono.world import World

SAMPLES = 200
CONTENTS = [np.random.default_rng(number).bytes(31 * number % 97) for number in range(SAMPLES)]
LENGTHS = np.array([len(content) for content in CONTENTS], np.int32)


def begin(world: World, count: int) -> list[Segment]:
    """A stretch for each rank, in `count` segments."""
    own = np.flatnonzero(at_first(SAMPLES, world.size) == world.rank)
    segments = []
    for numbers in np.array_split(own, count):
        data = np.frombuffer(b"".join(CONTENTS[number] for number in numbers), np.uint8)
        offsets = np.concatenate([[0], LENGTHS[numbers].cumsum(dtype=np.int64)])
        segments.append(Segment.of(int(numbers[0]) if len(numbers) else 0, [Samples(data, offsets)]))
    return segments


def check(world: World, segments: list[Segment], holders: np.ndarray) -> None:
    """This rank holds what it is to hold, and nothing else, whole."""
    numbers = np.concatenate([segment.numbers for segment in segments])
    assert np.sort(numbers).tolist() == np.flatnonzero(holders == world.rank).tolist()
    sums = sum(zlib.crc32(segment.sample(row)) for segment in segments for row in range(len(segment)))
    assert sums == sum(zlib.crc32(CONTENTS[number]) for number in numbers)


@pytest.mark.parametrize("count", [1, 4])
def test_after_100_shuffles_every_sample_is_there_once(group: World, count: int) -> None:
    segments, shelf = begin(group, count), None
    for epoch in range(100):
        holders = np.random.default_rng(epoch).integers(0, group.size, SAMPLES).astype(np.int32)
        shelf = shuffle(group, segments, holders, LENGTHS, shelf)
        check(group, segments, holders)
    shelf.free()
    everywhere = group.gather([number for segment in segments for number in segment.numbers.tolist()])
    assert sorted(number for numbers in everywhere for number in numbers) == list(range(SAMPLES))


@pytest.mark.parametrize("count", [1, 3, SAMPLES])
def test_between_nodes(spread: World, count: int) -> None:
    segments, shelf = begin(spread, count), None
    for epoch in range(4 if count < SAMPLES else 1):
        holders = np.random.default_rng(epoch).integers(0, spread.size, SAMPLES).astype(np.int32)
        shelf = shuffle(spread, segments, holders, LENGTHS, shelf)
        check(spread, segments, holders)
    shelf.free()


@pytest.mark.parametrize("where", ["group", "spread"])
def test_all_to_one_rank_and_back(request: pytest.FixtureRequest, where: str) -> None:
    world = request.getfixturevalue(where)
    segments, shelf = begin(world, 2), None
    for holders in (np.full(SAMPLES, world.size - 1, np.int32), at_first(SAMPLES, world.size)) * 2:
        shelf = shuffle(world, segments, holders, LENGTHS, shelf)
        check(world, segments, holders)
    shelf.free()
