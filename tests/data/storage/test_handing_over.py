"""Ranks that begin take over what others have left in the memory of their hosts; each rank is a thread."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data.options import DataOptions
from unisono.data.order import permutation, share, steps_of
from unisono.data.pack.stripe import OpenStripes
from unisono.data.storage import free_memory, handing_over, partitioned
from unisono.data.storage.partitioned import PartitionedStorage
from unisono.data.storage.sample_store import HEADER_BYTES, map_file
from unisono.launch import MEMORY_VARIABLE
from unisono.schedules.pieces import bounds

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH = 7


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in memory of an elastic run, the same for all hosts."""
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    return tmp_path / "memory"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the samples that are read from stripes."""
    numbers, reads = list[int](), OpenStripes.read

    def count(stripes: OpenStripes, first: int, last: int) -> Iterator[Any]:
        numbers.extend(range(first, last))
        return reads(stripes, first, last)

    monkeypatch.setattr(OpenStripes, "read", count)
    return numbers


def generation(
    pack: Any, epoch: int, after: Callable[[Any, PartitionedStorage], object] = lambda *_: None, virtual: int = 0
) -> Any:
    """Ranks that begin, see an epoch and are killed. Each returns the numbers of what it saw, and its note."""
    index, contents = pack

    def work(world: Any) -> tuple[list[int], str]:
        storage, seen = PartitionedStorage(index, world, DataOptions(), segment_bytes=200), list[int]()
        storage.virtual = virtual
        order = permutation(len(index), 1, epoch)
        storage.epoch(order, BATCH)
        for step in range(steps_of(len(index), BATCH)):
            wanted = share(order, BATCH, step, world.rank, world.size, virtual)
            assert [sample.tobytes() for sample in storage.samples(wanted)] == [contents[each] for each in wanted]
            seen += wanted.tolist()
        after(world, storage)
        return seen, storage.note

    return work


def each_once(results: list[tuple[list[int], str]]) -> list[int]:
    return sorted(sample for seen, _ in results for sample in seen)


@pytest.mark.parametrize("following", [1, 2, 3, 5])
@pytest.mark.parametrize("epoch", [0, 1])
def test_what_is_left_is_not_read_again(
    anywhere: OnRanks, audio_samples: Any, memory: Path, read: list[int], following: int, epoch: int
) -> None:
    every = list(range(len(audio_samples.index)))
    assert each_once(anywhere(3, generation(audio_samples, 0))) == every
    assert sorted(read) == every
    read.clear()
    results = anywhere(following, generation(audio_samples, epoch))
    assert each_once(results) == every
    assert read == []
    assert {note for _, note in results} == {f"{len(every)} of {len(every)} samples were left in memory"}
    assert len(list(memory.iterdir())) == following, "what was taken over is removed"


def test_as_many_ranks_go_on_with_what_each_has_left(
    anywhere: OnRanks, audio_samples: Any, memory: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    anywhere(3, generation(audio_samples, 0))
    moved = list[object]()
    monkeypatch.setattr(partitioned, "shuffle", lambda *given: moved.append(given))
    anywhere(3, generation(audio_samples, 0))
    assert moved == []


def test_a_rank_that_has_left_more_than_the_others_goes_on_with_it(
    anywhere: OnRanks, many: Any, memory: Path, read: list[int]
) -> None:
    """Rank 2 has two of four shares, more than the room for chance takes: its file is larger than the others'."""
    for epoch in range(3):
        results = anywhere(3, generation(many, epoch, virtual=4))
        assert each_once(results) == list(range(len(many.index)))
        assert len(results[2][0]) > 1.5 * len(results[0][0])
    assert len(read) == len(many.index), "in the first generation alone"


def test_a_storage_whose_samples_another_one_took_over_still_grows(anywhere: OnRanks, tiny: Any, memory: Path) -> None:
    def grow(_: Any, storage: PartitionedStorage) -> None:
        other = PartitionedStorage(tiny.index, storage.world, DataOptions(), segment_bytes=200)
        storage._store.grow(np.array([3, 3]))
        for each in (storage, other):
            assert [sample.tobytes() for sample in each.samples(each.numbers)] == [
                tiny.samples[n] for n in each.numbers
            ]

    anywhere(2, generation(tiny, 0, grow))


def test_stretches_are_given_of_what_was_left(anywhere: OnRanks, audio_samples: Any, memory: Path) -> None:
    index, contents = audio_samples

    def work(world: Any) -> None:
        storage = PartitionedStorage(index, world, DataOptions(), segment_bytes=200)
        storage.give_stretches()
        first, last = bounds(len(index), world.size, world.rank)
        assert storage.numbers.tolist() == list(range(first, last))
        assert [sample.tobytes() for sample in storage.samples(storage.numbers)] == contents[first:last]

    anywhere(3, generation(audio_samples, 0))
    anywhere(2, work)


def test_what_was_being_moved_is_read_anew(
    anywhere: OnRanks, audio_samples: Any, memory: Path, read: list[int]
) -> None:
    lost = list[int]()

    def die(world: Any, storage: PartitionedStorage) -> None:
        if world.rank == 1:
            storage._store.move()
            lost.extend(storage.numbers.tolist())

    every = list(range(len(audio_samples.index)))
    anywhere(3, generation(audio_samples, 0, die))
    read.clear()
    results = anywhere(2, generation(audio_samples, 0))
    assert each_once(results) == every
    batches = audio_samples.index.stripe, audio_samples.index.batch
    assert {tuple(each[sample] for each in batches) for sample in read} == {
        tuple(each[sample] for each in batches) for sample in lost
    }
    assert len(read) == len(set(read)), "no batch is read twice"
    assert results[0][1].startswith(f"{len(every) - len(lost)} of ")


def test_hosts_hand_over_what_others_need(
    on_ranks: OnRanks, audio_samples: Any, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is a host. One is gone, and comes back."""
    here, every = threading.local(), list(range(len(audio_samples.index)))
    monkeypatch.setattr(partitioned, "names_of", lambda _: here.memory / "samples-pack")

    def on_hosts(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
        def on_host(world: Any) -> Any:
            here.memory = tmp_path / f"host-{world.rank}"
            return work(world)

        return on_ranks(ranks, on_host)

    on_hosts(3, generation(audio_samples, 0))
    shutil.rmtree(tmp_path / "host-2")
    order = permutation(len(every), 1, 0)
    lost = [sample for step in range(steps_of(len(every), BATCH)) for sample in share(order, BATCH, step, 2, 3)]
    read.clear()
    results = on_hosts(2, generation(audio_samples, 0))
    assert each_once(results) == every
    assert set(lost) <= set(read)
    assert results[0][1].startswith(f"{len(every) - len(lost)} of ")
    read.clear()
    assert each_once(on_hosts(3, generation(audio_samples, 0))) == every
    assert read == []


def test_copies_of_groups_are_taken_over(anywhere: OnRanks, audio_samples: Any, memory: Path, read: list[int]) -> None:
    index, contents = audio_samples

    def work(world: Any) -> list[int]:
        storage = PartitionedStorage(index, world, DataOptions(groups=2))
        samples = [sample.tobytes() for sample in storage.samples(storage.numbers)]
        assert samples == [contents[sample] for sample in storage.numbers]
        return storage.numbers.tolist()

    for _ in range(2):
        assert sorted(sample for held in anywhere(4, work) for sample in held) == sorted(2 * [*range(len(index))])
    assert len(read) == 2 * len(index), "in the first generation alone"


@pytest.mark.parametrize("room", [0, 1])
def test_where_memory_is_short_samples_are_read_anew(
    anywhere: OnRanks, audio_samples: Any, memory: Path, read: list[int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for none of two copies, or for one."""
    anywhere(2, generation(audio_samples, 0))
    bytes_of_one = 10 * audio_samples.index.nbytes

    def free(shared: bool) -> int:
        taken = any(path.name.startswith("samples-") for path in memory.iterdir())
        return (room * bytes_of_one * (not taken)) if shared else 1 << 40

    monkeypatch.setattr(free_memory, "free_bytes", free)
    read.clear()
    results = anywhere(2, generation(audio_samples, 1))
    assert each_once(results) == sorted(read) == list(range(len(audio_samples.index)))
    assert bool(list(memory.iterdir())) == bool(room)


def test_the_choice_of_a_storage_does_not_count_what_is_taken_over(
    on_ranks: OnRanks, audio_samples: Any, memory: Path
) -> None:
    on_ranks(2, generation(audio_samples, 0))
    assert handing_over.left_bytes() >= audio_samples.index.nbytes
    assert handing_over.left_bytes({}) == 0
    assert handing_over.names_of(audio_samples.index, {}) is None


def test_another_pack_is_not_taken_for_this_one(on_ranks: OnRanks, tiny: Any, many: Any, memory: Path) -> None:
    on_ranks(2, generation(tiny, 0))
    results = on_ranks(2, generation(many, 0))
    assert {note for _, note in results} == {""}


def test_samples_that_lie_at_the_end_of_their_memory_are_found(tmp_path: Path) -> None:
    lengths, path = np.array([3, 9, 8], np.int32), tmp_path / "samples-x"
    mapped = map_file(path, HEADER_BYTES + 64 + 6 * 8)  # room for 4 rows and 6 blocks
    mapped[:HEADER_BYTES].view(np.int64)[:5] = 4, 6, 2, 3, 4
    mapped[HEADER_BYTES:].view(np.int32)[2:4] = 1, 0
    mapped[-24:] = np.frombuffer(b"123456789-------abc-----", np.uint8)
    left = handing_over.LeftFile(path, lengths, 8)
    assert left.numbers.tolist() == [1, 0]
    (stretch,) = left.stretches(np.array([1, 0]))
    assert [sample.tobytes() for sample in stretch.each()] == [b"abc", b"123456789"]
