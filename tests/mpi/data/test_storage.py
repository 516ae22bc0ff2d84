"""A pack in the memory of real ranks."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.pack.test_packing import samples_of

from unisono.data.feed import packed_feed
from unisono.data.options import MEGABYTE, DataOptions
from unisono.data.order import ShuffleOptions, permutation, share, steps_of
from unisono.data.pack.index import Index, read_index
from unisono.data.pack.stripe import OpenStripes
from unisono.data.storage import FILES, STORAGES, Storage, free_memory, read_storage, replicated, sample_store
from unisono.data.storage.partitioned import PartitionedStorage
from unisono.data.storage.replicated import ReplicatedStorage
from unisono.data.storage.streamed import StreamedStorage
from unisono.errors import PackError
from unisono.launch import MEMORY_VARIABLE
from unisono.mpi import MPI
from unisono.transports.window import Window, allocate_window
from unisono.world import World

BATCH = 16

IN_PACKS = [name for name in STORAGES if name != FILES]


def read(name: str, index: Index, world: World) -> Storage:
    """The pack in the storage of that name."""
    return read_storage(DataOptions(storage=name), index, world)


def groups_of(ranks: int) -> list[int]:
    return [groups for groups in range(1, ranks + 1) if not ranks % groups]


def wrong(world: World, make: Callable[[], object]) -> str:
    """What PackError says, the same on every rank."""
    with pytest.raises(PackError) as caught:
        make()
    (message,) = set(world.all_gather_object(str(caught.value)))
    return message


def see(memory: Storage, world: World, samples: int, epoch: int) -> list[bytes]:
    """What this rank sees in an epoch."""
    order = permutation(samples, 7, epoch)
    memory.epoch(order, BATCH)
    shares = [share(order, BATCH, step, world.rank, world.size) for step in range(steps_of(samples, BATCH))]
    return [sample.tobytes() for numbers in shares for sample in memory.samples(numbers)]


@pytest.mark.parametrize("share_of_pack", [0.3, 1.0])
def test_a_cache_changes_no_batch_and_saves_reads(
    group: World, spread: World, packs: Path, share_of_pack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packs / "train")
    read_blocks = list[int]()

    def counting(stripes: OpenStripes, first: int, last: int) -> object:
        read_blocks.append(first)
        return read(stripes, first, last)

    read = OpenStripes.read
    monkeypatch.setattr(OpenStripes, "read", counting)
    for world in (group, spread):
        seen = list[list[bytes]]()
        for cache in (0, int(share_of_pack * index.nbytes)):
            storage = StreamedStorage(
                index, world, DataOptions(buffer_megabytes=2000 / MEGABYTE, cache_megabytes=cache / MEGABYTE)
            )
            read_blocks.clear()
            order = storage.order(3, 0, BATCH, ShuffleOptions())
            storage.epoch(order, BATCH)
            shares = [share(order, BATCH, step, world.rank, world.size) for step in range(steps_of(len(index), BATCH))]
            seen.append([sample.tobytes() for numbers in shares for sample in storage.samples(numbers)])
            held = sum(world.node_world().all_gather_object(storage.nbytes if cache else 0))
            assert held >= 0.9 * cache - 2000
            if share_of_pack == 1.0:
                assert bool(read_blocks) == (cache == 0)
            storage.close()
        assert seen[0] == seen[1]


def test_a_share_and_a_copy_give_the_same_samples(group: World, spread: World, packs: Path) -> None:
    index = read_index(packs / "train")
    written = samples_of(index)
    for world in (group, spread):
        for groups in groups_of(world.size):
            memories = (
                PartitionedStorage(index, world, DataOptions(groups=groups), 700),
                ReplicatedStorage(index, world),
            )
            for epoch in range(2):
                order = permutation(len(index), 7, epoch)
                first, second = (see(memory, world, len(index), epoch) for memory in memories)
                assert first == second
                everyone = world.all_gather_object(first)
                assert sorted(sample for seen in everyone for sample in seen) == sorted(written)
                assert len(first) == sum(
                    len(share(order, BATCH, step, world.rank, world.size))
                    for step in range(steps_of(len(index), BATCH))
                )
            for memory in memories:
                memory.close()


@pytest.mark.parametrize("name", IN_PACKS)
def test_a_rank_reads_its_own_samples_while_the_others_are_in_no_call(
    group: World, spread: World, packs: Path, name: str
) -> None:
    index = read_index(packs / "train")
    written = samples_of(index)
    for world in (group, spread):
        storage = read(name, index, world)
        own = storage.own(permutation(len(index), 7, 0))
        assert own.tolist() == sorted(set(own.tolist()))
        for rank in range(world.size):
            if rank == world.rank:
                for _ in range(2):
                    assert [sample.tobytes() for sample in storage.samples(own)] == [written[n] for n in own]
            world.barrier()
        everyone = world.all_gather_object(own.tolist())
        assert {sample for numbers in everyone for sample in numbers} == set(range(len(index)))
        storage.close()


def test_after_100_shuffles_every_group_has_every_sample_once(group: World, packs: Path) -> None:
    index = read_index(packs / "train")
    checks = np.array([zlib.crc32(content) for content in samples_of(index)], np.int64)
    rng = np.random.default_rng(group.size)
    for groups in groups_of(group.size):
        memory = PartitionedStorage(index, group, DataOptions(groups=groups), int(rng.choice([1000, 3000, 1 << 20])))
        for epoch in range(100):
            memory.epoch(permutation(len(index), 0, epoch), int(rng.integers(1, 60)))
            checksums = [zlib.crc32(sample) for sample in memory.samples(memory.numbers)]
            assert checksums == checks[memory.numbers].tolist()
        everyone = group.all_gather_object(memory.numbers.tolist())
        for first in range(0, group.size, memory.members):
            held = [sample for numbers in everyone[first : first + memory.members] for sample in numbers]
            assert sorted(held) == list(range(len(index)))
        memory.close()


def test_a_segment_for_each_sample(group: World, packs: Path) -> None:
    index = read_index(packs / "test")
    memory = PartitionedStorage(index, group, DataOptions(), segment_bytes=64)
    written = samples_of(index)
    for epoch in range(3):
        memory.epoch(permutation(len(index), 0, epoch), 5)
        assert [sample.tobytes() for sample in memory.samples(memory.numbers)] == [written[n] for n in memory.numbers]
    assert sum(group.all_gather_object(len(memory.numbers))) == len(index)


def test_all_together_hold_a_copy_for_each_group_or_each_node(group: World, spread: World, packs: Path) -> None:
    index = read_index(packs / "train")
    for world in (group, spread):
        for groups in groups_of(world.size):
            memory = PartitionedStorage(index, world, DataOptions(groups=groups))
            assert sum(world.all_gather_object(memory.nbytes)) == groups * index.nbytes
            memory.close()
            assert memory.nbytes == 0
        copy = ReplicatedStorage(index, world)
        assert sum(world.all_gather_object(copy.nbytes)) == world.nodes * index.nbytes
        everything = np.random.default_rng(world.rank).permutation(len(index))
        written = samples_of(index)
        assert [sample.tobytes() for sample in copy.samples(everything)] == [written[n] for n in everything]
        copy.close()


@pytest.mark.parametrize("way", IN_PACKS)
def test_what_does_not_fit_is_refused_on_every_rank(
    spread: World, packs: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packs / "train")
    last = spread.size - 1
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: 100 if spread.rank == last else 1 << 40)
    message = wrong(spread, lambda: read(way, index, spread))
    assert message.startswith(f"node {spread.placement.node_of(last)} has 0.0 GB of ")
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: 1 << 20)
    read(way, index, spread).close()


def test_memory_is_counted_for_all_ranks_of_a_node_together(
    group: World, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packs / "train")
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: index.nbytes)
    ReplicatedStorage(index, group).close()
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: index.nbytes - 1)
    assert "node 0" in wrong(group, lambda: ReplicatedStorage(index, group))


def test_groups_that_cannot_be_formed_are_refused(group: World, packs: Path) -> None:
    index, groups = read_index(packs / "train"), group.size + 1
    message = wrong(group, lambda: PartitionedStorage(index, group, DataOptions(groups=groups)))
    assert message.endswith(f"cannot form {groups} groups of one size; {groups_of(group.size)} can be formed")


@pytest.mark.parametrize("way", IN_PACKS)
def test_a_stripe_that_one_rank_cannot_read_is_reported_to_all(
    group: World, packs: Path, tmp_path: Path, way: str
) -> None:
    def damage() -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(packs / "train", folder)
        sorted(folder.glob("stripe-*"))[-1].unlink()
        return folder

    index = read_index(group.call_on_root(damage))
    message = wrong(group, lambda: read(way, index, group))
    first = min(rank for rank in range(group.size) if (rank + 1) * len(index) // group.size > last_stripe(index))
    assert message.partition(": ")[0] in {f"rank {first}", "rank 0"}, "rank 0 where each rank reads all"
    assert "is missing" in message


@pytest.mark.parametrize("way", IN_PACKS)
@pytest.mark.parametrize("damaged", ["train", "test"])
def test_no_memory_is_kept_for_a_pack_that_cannot_be_read(
    group: World, packs: Path, tmp_path: Path, way: str, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage() -> Path:
        shutil.copytree(packs, tmp_path / "packs")
        sorted((tmp_path / "packs" / damaged).glob("stripe-*"))[-1].unlink()
        return tmp_path / "packs"

    windows = []

    def allocate(comm: Any, nbytes: int) -> Window | None:
        windows.append(allocate_window(comm, nbytes))
        return windows[-1]

    for module in (sample_store, replicated):
        monkeypatch.setattr(module, "allocate_window", allocate)
    options = DataOptions(pack=str(group.call_on_root(damage)), storage=way, cache_megabytes=1)
    assert "is missing" in wrong(group, lambda: packed_feed(options, group, 0))
    assert [window._window for window in windows if window] == [MPI.WIN_NULL] * len(windows)


def last_stripe(index: Index) -> int:
    """The first sample of the last stripe."""
    return int(np.searchsorted(index.stripe, index.stripe[-1]))


def test_a_partition_larger_than_shared_memory_is_stored_without_it(
    group: World, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packs / "train")
    epochs = []
    for shared in (1 << 40, 100):
        monkeypatch.setattr(free_memory, "free_bytes", lambda shared, free=shared: free if shared else 1 << 40)
        memory = PartitionedStorage(index, group, DataOptions(), segment_bytes=700)
        epochs.append([see(memory, group, len(index), epoch) for epoch in range(3)])
        memory.close()
    assert epochs[0] == epochs[1]


def test_memory_that_others_took_after_it_was_counted_is_done_without(
    group: World, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(packs / "train")
    monkeypatch.setattr("unisono.transports.window.populate", lambda _: group.rank != group.size - 1)
    memory = PartitionedStorage(index, group, DataOptions(), segment_bytes=700)
    assert sum(group.all_gather_object(len(see(memory, group, len(index), 0)))) == len(index)
    assert not memory._store.shared
    memory.close()
    assert "has no more shared memory" in wrong(group, lambda: ReplicatedStorage(index, group))


def test_what_others_have_left_is_taken_over(
    group: World, spread: World, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node, in files that all its ranks map, and by messages."""
    index = read_index(packs / "train")
    for place, world in enumerate((group, spread)):
        monkeypatch.setenv(MEMORY_VARIABLE, str(world.call_on_root(lambda: tmp_path) / f"{place}"))
        epochs = list[object]()
        for _ in range(3):  # the last one finds what two epochs have moved
            memory = PartitionedStorage(index, world, DataOptions(), segment_bytes=700)
            epochs.append([see(memory, world, len(index), epoch) for epoch in range(2)])
            memory.close()
        assert epochs[0] == epochs[1] == epochs[2]
        assert memory.note == f"{len(index)} of {len(index)} samples were left in memory"
