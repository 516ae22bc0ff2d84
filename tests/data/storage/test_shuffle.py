"""In one process: each rank a thread."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.data.order import permutation, ranks_of
from unisono.data.pack.stripe import EncodedSamples
from unisono.data.storage.partitioned import (
    SPARE_DEVIATIONS,
    CompactionPlan,
    owners_in_epoch,
    plan_compaction,
    shuffle,
    side_by_side,
)
from unisono.data.storage.sample_store import SampleStore, block_of, blocks_of

LONE = SimpleNamespace(size=1, nodes=1, rank=0, all_gather_object=lambda own: [own])
"""A world of one rank."""

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def store_of(world: Any, segments: list[list[int]], contents: list[bytes], room: tuple[int, int]) -> SampleStore:
    """A store with samples of these numbers in each segment; with so much room, or as much as they take."""
    lengths = np.array([len(content) for content in contents], np.int32)
    numbers = [sample for segment in segments for sample in segment]
    blocks = blocks_of(lengths[numbers], block_of(lengths)).sum(dtype=int)
    rows, blocks = np.max(world.all_gather_object((room, (len(numbers), blocks))), axis=(0, 1)).tolist()
    store = SampleStore(world, lengths, (rows, blocks), shared=world.nodes == 1 and world.size > 1)
    data = np.frombuffer(b"".join(contents[sample] for sample in numbers), np.uint8)
    ends = np.concatenate([[0], lengths[numbers].cumsum(dtype=np.int64)])
    cuts = np.cumsum([0, *(len(segment) for segment in segments)])
    store.fill(np.array(numbers, np.int32), [EncodedSamples(data, ends)], cuts)
    return store


def held_on(store: SampleStore) -> dict[int, bytes]:
    numbers = store.numbers.tolist()
    contents = [sample.tobytes() for sample in store.samples(np.arange(len(numbers)))]
    assert len(set(numbers)) == len(numbers), "no sample is there twice"
    return dict(zip(numbers, contents, strict=True))


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
        segments = [np.flatnonzero(begin == world.rank * count + segment).tolist() for segment in range(count)]
        store, held = store_of(world, segments, contents, room), []
        for owners in rounds:
            shuffle(store, owners)
            held.append(held_on(store))
        store.free()
        return held

    for rank, held in enumerate(anywhere(ranks, work)):
        for owners, held_round in zip(rounds, held, strict=True):
            assert held_round == {sample: contents[sample] for sample in np.flatnonzero(owners == rank).tolist()}


def test_received_samples_are_in_the_order_of_senders_and_rows(anywhere: OnRanks) -> None:
    contents = [bytes([sample]) * (7 * (sample % 4)) for sample in range(40)]
    owners = np.random.default_rng(0).integers(0, 4, 40)

    def work(world: Any) -> list[list[int]]:
        first = 10 * world.rank
        store = store_of(world, [list(range(first, first + 6)), list(range(first + 6, first + 10))], contents, (20, 40))
        shuffle(store, owners)
        rows = store.cuts[:, 0] - store.cuts[0, 0]
        return [store.numbers[rows[segment] : rows[segment + 1]].tolist() for segment in (0, 1)]

    for rank, segments in enumerate(anywhere(4, work)):
        wanted = [sample for sample in range(40) if owners[sample] == rank]
        assert segments == [[n for n in wanted if n % 10 < 6], [n for n in wanted if n % 10 >= 6]]


def test_a_store_grows_only_when_one_rank_receives_all(anywhere: OnRanks) -> None:
    contents = [bytes([sample]) * (7 * (sample % 4)) for sample in range(40)]

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
    contents = [bytes([sample] * (length or 9 + sample % 3)) for sample in range(64)]

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


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.lists(st.integers(0, 5), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
        lambda sizes: np.array(sizes, np.int64).reshape(*shape, 1) * np.array([1, 3])
    )
)
"""What each of some ranks gives in each of some rounds: rows, and blocks, three for each row."""


def both(*numbers: int) -> NDArray[np.int64]:
    return np.array([[rows, 3 * rows] for rows in numbers])


def clash(
    plan: CompactionPlan, cuts: NDArray[np.int64], received_counts: NDArray[np.int64], room: int, laid_out: bool
) -> bool:
    """Play the plan row by row: whether anything is put over what is still needed, over what has come, or outside."""
    memory = [-1] * room
    for segment, (first, last) in enumerate(pairwise(cuts[:, 0].tolist())):
        memory[first:last] = [segment] * (last - first)
    for segment in plan.rounds:
        if laid_out:
            memory = [-1 if held == segment else held for held in memory]
        for (row, block), (count, _) in zip(
            plan.destinations[:, segment].tolist(), received_counts[:, segment].tolist(), strict=True
        ):
            assert block - plan.cuts[0, 1] == 3 * (row - plan.cuts[0, 0]), "rows and blocks go together"
            if not all(0 <= at < room and memory[at] == -1 for at in range(row, row + count)):
                return True
            memory[row : row + count] = [100 + segment] * count
        memory = [-1 if held == segment else held for held in memory]
    came = [segment for segment, count in enumerate(received_counts[..., 0].sum(axis=0)) for _ in range(count)]
    assert memory[plan.cuts[0, 0] : plan.cuts[-1, 0]] == [100 + segment for segment in came], "segment by segment"
    return False


def test_the_example_of_the_docstring() -> None:
    received_counts = np.array([[[1, 3], [2, 6]], [[2, 6], [1, 3]]])
    plan = plan_compaction(both(0, 3, 5), received_counts, np.array([9, 27]), up=True, laid_out=False)
    assert plan.cuts.tolist() == both(3, 6, 9).tolist()
    assert list(plan.rounds) == [1, 0]
    assert plan.destinations[:, 1].tolist() == both(6, 8).tolist()
    assert plan.destinations[:, 0].tolist() == both(3, 4).tolist()
    assert plan.missing.tolist() == [0, 0]
    assert plan_compaction(
        both(0, 3, 5), received_counts, np.array([8, 24]), up=True, laid_out=False
    ).missing.tolist() == [1, 3]
    assert plan_compaction(
        both(0, 3, 5), received_counts, np.array([6, 18]), up=True, laid_out=True
    ).missing.tolist() == [0, 0]
    back = plan_compaction(plan.cuts, received_counts, np.array([9, 27]), up=False, laid_out=False)
    assert (list(back.rounds), back.cuts.tolist()) == ([0, 1], both(0, 3, 6).tolist())


@given(SIZES, SIZES, st.integers(0, 30), st.booleans(), st.booleans())
def test_no_needed_sample_is_overwritten_if_memory_suffices(
    sent_counts: NDArray[np.int64], received_counts: NDArray[np.int64], free: int, up: bool, laid_out: bool
) -> None:
    segments = min(sent_counts.shape[1], received_counts.shape[1])
    sizes, received_counts = sent_counts[:, :segments].sum(axis=0), received_counts[:, :segments]
    room = int(sizes[:, 0].sum()) + free
    cuts = np.concatenate([both(0), sizes.cumsum(axis=0)]) + (0 if up else free * np.array([1, 3]))
    plan = plan_compaction(cuts, received_counts, room * np.array([1, 3]), up, laid_out)
    assert plan.missing[1] == 3 * plan.missing[0]
    if not plan.missing.any():
        assert not clash(plan, cuts, received_counts, room, laid_out)
        return
    grown = cuts + (0 if up else plan.missing)
    again = plan_compaction(grown, received_counts, room * np.array([1, 3]) + plan.missing, up, laid_out)
    assert not again.missing.any(), "once is enough"
    assert not clash(again, grown, received_counts, room + int(plan.missing[0]), laid_out)
    one_less = plan.missing - [1, 3]
    last = plan_compaction(
        cuts + (0 if up else one_less), received_counts, room * np.array([1, 3]) + one_less, up, laid_out
    )
    assert last.missing.tolist() == [1, 3], "and no more than it takes"


@given(
    st.lists(st.binary(max_size=40), max_size=40) | st.lists(st.binary(min_size=5, max_size=5), max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(0, 99),
)
def test_counts_are_what_counting_gives(contents: list[bytes], cuts: list[int], seed: int) -> None:
    rows = [0, *sorted(min(cut, len(contents)) for cut in cuts), len(contents)]
    to = np.random.default_rng(seed).integers(0, 4, len(contents)).astype(np.uint8)
    store = store_of(LONE, [list(range(*ends)) for ends in pairwise(rows)], contents, (80, 300))
    store.world = SimpleNamespace(size=4)  # type: ignore[assignment]
    counts = store.counts(to)
    assert counts.shape == (4, len(rows) - 1, 2)
    for segment, (first, last) in enumerate(pairwise(rows)):
        for rank in range(4):
            own = [-(-len(contents[row]) // store.block) for row in range(first, last) if to[row] == rank]
            assert counts[rank, segment].tolist() == [len(own), sum(own)]


def test_side_by_side() -> None:
    assert side_by_side(both(3, 0, 2)).tolist() == both(0, 3, 3).tolist()


@pytest.mark.parametrize(("ranks", "segments"), [(2, 1), (4, 5), (8, 20)])
def test_spare_rows_suffice_for_random_variation(ranks: int, segments: int) -> None:
    """Two ranks' segments slide to and fro 20 times, with samples of unlike lengths, and nothing is ever short."""
    samples = 4000 * ranks
    rng = np.random.default_rng(ranks)
    blocks = rng.lognormal(5, 0.5, samples).astype(np.int64) + 1
    owners = ranks_of(samples, samples, ranks)
    largest = max(np.bincount(owners, blocks))
    rows = 4000 + SPARE_DEVIATIONS * math.isqrt(4000)
    for laid_out in (False, True):
        most = rows if laid_out else rows + -(-4000 // segments)
        room = np.array([most, -(-int(largest) * most // 4000)])
        held = [np.array_split(np.flatnonzero(owners == rank), segments) for rank in range(ranks)]
        ends = [np.cumsum([0, *(blocks[numbers].sum() for numbers in own)]) for own in held]
        cuts = [np.stack([np.cumsum([0, *map(len, own)]), end], 1) for own, end in zip(held, ends, strict=True)]
        for epoch in range(20):
            to = owners_in_epoch(permutation(samples, 1, epoch), 64, np.arange(ranks))
            for rank in (0, ranks - 1):
                mine = [[numbers[to[numbers] == rank] for numbers in own] for own in held]
                received_counts = np.array([[(len(part), blocks[part].sum()) for part in own] for own in mine])
                plan = plan_compaction(cuts[rank], received_counts, room, epoch % 2 == 0, laid_out)
                assert not plan.missing.any()
                cuts[rank] = plan.cuts
            held = [
                [np.concatenate([own[part][to[own[part]] == rank] for own in held]) for part in range(segments)]
                for rank in range(ranks)
            ]
