"""In one process: each rank a thread."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.order_quality import compare_with_permutations

from unisono.data.options import DataOptions
from unisono.data.order import permutation, share, steps_of
from unisono.data.storage import free_memory
from unisono.data.storage.partitioned import PartitionedStorage, plan_partition
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

SEATS = st.integers(1, 9).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks), st.sampled_from([groups for groups in range(1, ranks + 1) if not ranks % groups])
    )
)
"""Ranks, and groups that they can form."""


@settings(max_examples=25)
@given(SEATS, st.booleans(), st.sampled_from([15, 40, 400, 1 << 20]), st.integers(1, 70), st.integers(0, 99))
def test_each_rank_has_what_it_sees_and_each_group_has_all(
    anywhere: OnRanks,
    tiny: Any,
    audio_samples: Any,
    seats: tuple[int, int],
    small: bool,
    segment_bytes: int,
    batch: int,
    seed: int,
) -> None:
    index, contents = tiny if small else audio_samples
    segment_bytes = segment_bytes if small else max(200, segment_bytes)
    ranks, groups = seats
    samples = len(index)

    def work(world: Any) -> list[list[int]]:
        memory = PartitionedStorage(index, world, DataOptions(groups=groups), segment_bytes)
        held = [memory.numbers.tolist()]
        for epoch in range(2):
            order = permutation(samples, seed, epoch)
            memory.epoch(order, batch)
            for step in range(steps_of(samples, batch)):
                wanted = share(order, batch, step, world.rank, world.size)
                read_samples = [sample.tobytes() for sample in memory.samples(wanted)]
                assert read_samples == [contents[sample] for sample in wanted.tolist()]
            held.append(memory.numbers.tolist())
            assert held[-1] == sorted(held[-1])
            read_samples = [sample.tobytes() for sample in memory.samples(memory.numbers)]
            assert read_samples == [contents[sample] for sample in held[-1]]
            assert memory.nbytes == sum(map(len, read_samples))
        memory.close()
        assert memory.nbytes == 0
        return held

    members = ranks // groups
    for held in zip(*anywhere(ranks, work), strict=True):
        for first in range(0, ranks, members):
            together = [sample for rank in held[first : first + members] for sample in rank]
            assert sorted(together) == list(range(samples))


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (3, 1), (4, 2), (9, 3)])
def test_nothing_is_lost_in_100_shuffles(anywhere: OnRanks, audio_samples: Any, ranks: int, groups: int) -> None:
    index, contents = audio_samples

    def work(world: Any) -> int:
        memory = PartitionedStorage(index, world, DataOptions(groups=groups), 2000)
        for epoch in range(100):
            memory.epoch(permutation(len(index), 1, epoch), 13)
        return sum(zlib.crc32(sample) for sample in memory.samples(memory.numbers))

    assert sum(anywhere(ranks, work)) == groups * sum(map(zlib.crc32, contents))


@pytest.mark.parametrize("ranks", [4, 5])
def test_one_shuffle_of_what_is_sorted_by_class_is_as_good_as_a_true_permutation(
    on_ranks: OnRanks, many: Any, ranks: int
) -> None:
    index, batch = many.index, 40
    steps = range(steps_of(len(index), batch))

    def work(world: Any) -> tuple[list[list[int]], list[list[int]]]:
        memory = PartitionedStorage(index, world, DataOptions())
        rng = np.random.default_rng(world.rank)
        without = np.array_split(rng.permutation(memory.numbers), len(steps))  # random, but of its own stretch alone
        order = permutation(len(index), 0, 0)
        memory.epoch(order, batch)
        shares = (memory.samples(share(order, batch, step, world.rank, world.size)) for step in steps)
        seen = [[int.from_bytes(sample.tobytes(), "little") for sample in samples] for samples in shares]
        return seen, [numbers.tolist() for numbers in without]

    shuffled, stretches = (
        np.array([sample for step in zip(*everyone, strict=True) for part in step for sample in part])
        for everyone in zip(*on_ranks(ranks, work), strict=True)
    )
    assert sorted(shuffled) == sorted(stretches) == list(range(len(index)))
    assert compare_with_permutations(shuffled, index.label).max_z_score < 4
    assert compare_with_permutations(stretches, index.label).max_z_score > 20


def test_segments_of_a_byte_are_samples(anywhere: OnRanks, tiny: Any) -> None:
    def work(world: Any) -> list[int]:
        memory = PartitionedStorage(tiny.index, world, DataOptions(), segment_bytes=1)
        memory.epoch(permutation(61, 0, 0), 7)
        assert [sample.tobytes() for sample in memory.samples(memory.numbers)] == [
            tiny.samples[sample] for sample in memory.numbers
        ]
        return memory.numbers.tolist()

    assert sorted(sample for numbers in anywhere(3, work) for sample in numbers) == list(range(61))


@pytest.mark.parametrize("segment_bytes", [100, 1 << 20])
def test_no_store_grows_in_a_usual_run(anywhere: OnRanks, many: Any, segment_bytes: int) -> None:
    def work(world: Any) -> None:
        memory = PartitionedStorage(many.index, world, DataOptions(), segment_bytes=segment_bytes)
        room = memory._store.capacity.tolist()
        for epoch in range(6):
            memory.epoch(permutation(len(many.index), 0, epoch), 32)
            assert memory._store.capacity.tolist() == room
        memory.close()

    anywhere(4, work)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_where_there_is_no_shared_memory_it_goes_by_messages(
    on_one_node: OnRanks, audio_samples: Any, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: free if shared else 1 << 40)
    index, contents = audio_samples

    def work(world: Any) -> list[int]:
        memory = PartitionedStorage(index, world, DataOptions(), segment_bytes=2000)
        assert memory._store.shared == bool(free)
        memory.epoch(permutation(len(index), 0, 0), 7)
        assert [sample.tobytes() for sample in memory.samples(memory.numbers)] == [
            contents[sample] for sample in memory.numbers
        ]
        return memory.numbers.tolist()

    assert sorted(sample for numbers in on_one_node(4, work) for sample in numbers) == list(range(len(index)))


def test_samples_of_other_ranks_are_refused(on_ranks: OnRanks, tiny: Any) -> None:
    def work(world: Any) -> None:
        memory = PartitionedStorage(tiny.index, world, DataOptions())
        for sample in range(61):
            if sample in memory.numbers:
                assert memory.samples(np.array([sample]))[0].tobytes() == tiny.samples[sample]
            else:
                with pytest.raises(PackError, match=f"rank {world.rank} does not hold all of the samples"):
                    memory.samples(np.array([sample]))
        memory.close()
        with pytest.raises(PackError, match="does not hold"):
            memory.samples(np.array([0]))
        assert memory.samples(np.empty(0, np.int64)) == []

    on_ranks(3, work)


def test_groups_that_cannot_be_formed_are_refused_on_every_rank(on_ranks: OnRanks, tiny: Any) -> None:
    def work(world: Any) -> str:
        with pytest.raises(PackError) as caught:
            PartitionedStorage(tiny.index, world, DataOptions(groups=4))
        return str(caught.value)

    assert set(on_ranks(6, work)) == {"6 ranks cannot form 4 groups of one size; [1, 2, 3, 6] can be formed"}


def test_a_store_has_room_for_a_segment_and_at_most_a_tenth_more() -> None:
    for samples, segments in ((3000, 5), (10**6, 100)):
        plan = plan_partition(np.full(samples, 50, np.int32), 1, 50 * samples // segments)
        assert plan.segments == segments
        for shared, segment in ((True, samples // segments), (False, 0)):
            rows, blocks = plan.capacity(shared)
            assert samples + segment < rows == blocks < 1.1 * samples + segment
    assert plan_partition(np.full(1, 80, np.int32), 1).capacity(shared=True) == (7, 7)
