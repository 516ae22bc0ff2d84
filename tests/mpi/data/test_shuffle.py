"""The shuffle on real ranks, through shared memory and by messages: what is there stays there, once."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest

from unisono.data.order import ranks_of
from unisono.data.pack.stripe import EncodedSamples
from unisono.data.storage.partitioned import shuffle
from unisono.data.storage.sample_store import SampleStore, block_of, blocks_of
from unisono.world import World

SAMPLES = 200
UNLIKE = [np.random.default_rng(index).bytes(31 * index % 97) for index in range(SAMPLES)]
ALIKE = [np.random.default_rng(index).bytes(30) for index in range(SAMPLES)]


@pytest.fixture(params=["alike", "unlike"])
def contents(request: pytest.FixtureRequest) -> list[bytes]:
    """The samples: of one length, or of many."""
    return ALIKE if request.param == "alike" else UNLIKE


def begin(world: World, contents: list[bytes], count: int, private: bool = False) -> SampleStore:
    """A stretch for each rank, in `count` segments."""
    own = np.flatnonzero(ranks_of(SAMPLES, SAMPLES, world.size) == world.rank).astype(np.int32)
    lengths = np.array([len(content) for content in contents], np.int32)
    blocks = int(blocks_of(lengths[own], block_of(lengths)).sum())
    samples, blocks = (max(sizes) for sizes in zip(*world.all_gather_object((len(own), blocks)), strict=True))
    rows = samples + -(-samples // count) + 5 * math.isqrt(samples)
    room = rows, -(-blocks * rows // samples)
    store = SampleStore(world, lengths, room, shared=not private and world.nodes == 1 and world.size > 1)
    data = np.frombuffer(b"".join(contents[sample] for sample in own), np.uint8)
    ends = np.concatenate([[0], lengths[own].cumsum(dtype=np.int64)])
    store.fill(own, [EncodedSamples(data, ends)], np.arange(count + 1) * len(own) // count)
    return store


def check(store: SampleStore, contents: list[bytes], owners: np.ndarray) -> None:
    """This rank holds what it is to hold, and nothing else, whole."""
    numbers = store.numbers.tolist()
    assert sorted(numbers) == np.flatnonzero(owners == store.world.rank).tolist()
    sums = [zlib.crc32(sample) for sample in store.samples(np.arange(len(numbers)))]
    assert sums == [zlib.crc32(contents[sample]) for sample in numbers]


@pytest.mark.parametrize("count", [1, 4])
def test_after_100_shuffles_every_sample_is_there_once(group: World, contents: list[bytes], count: int) -> None:
    store = begin(group, contents, count)
    for epoch in range(100):
        owners = np.random.default_rng(epoch).integers(0, group.size, SAMPLES).astype(np.int32)
        shuffle(store, owners)
        check(store, contents, owners)
    everywhere = group.all_gather_object(store.numbers.tolist())
    assert sorted(sample for numbers in everywhere for sample in numbers) == list(range(SAMPLES))
    store.free()


@pytest.mark.parametrize("count", [1, 3, SAMPLES])
def test_between_nodes(spread: World, contents: list[bytes], count: int) -> None:
    store = begin(spread, contents, count)
    for epoch in range(4 if count < SAMPLES else 1):
        owners = np.random.default_rng(epoch).integers(0, spread.size, SAMPLES).astype(np.int32)
        shuffle(store, owners)
        check(store, contents, owners)
    store.free()


@pytest.mark.parametrize("where", ["group", "spread"])
def test_all_to_one_rank_and_back(request: pytest.FixtureRequest, contents: list[bytes], where: str) -> None:
    world = request.getfixturevalue(where)
    store = begin(world, contents, 2)
    for owners in (np.full(SAMPLES, world.size - 1, np.int32), ranks_of(SAMPLES, SAMPLES, world.size)) * 2:
        shuffle(store, owners)
        check(store, contents, owners)
    store.free()


def test_on_one_node_the_same_lies_at_the_same_rows_on_either_path(group: World, contents: list[bytes]) -> None:
    shared, private = begin(group, contents, 3), begin(group, contents, 3, private=True)
    for epoch in range(5):
        owners = np.random.default_rng(epoch).integers(0, group.size, SAMPLES)
        for store in (shared, private):
            shuffle(store, owners)
            check(store, contents, owners)
        assert shared.numbers.tolist() == private.numbers.tolist()
    shared.free()
    private.free()
