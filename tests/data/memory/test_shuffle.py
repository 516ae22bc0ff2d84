"""In one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.memory.segment import Segment
from unisono.data.memory.shuffle import shuffle
from unisono.data.pack.batches import Samples

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def segment_of(numbers: list[int], contents: list[bytes]) -> Segment:
    ends = np.cumsum([0, *(len(contents[number]) for number in numbers)])
    data = np.frombuffer(b"".join(contents[number] for number in numbers), np.uint8)
    whole = Segment.of(0, [Samples(data, ends.astype(np.int64))])
    return Segment(np.array(numbers, np.int32), whole.data.copy(), whole.lengths)


def held_in(segments: list[Segment]) -> dict[int, bytes]:
    held = [
        (number, segment.sample(row).tobytes())
        for segment in segments
        for row, number in enumerate(segment.numbers.tolist())
    ]
    assert len(dict(held)) == len(held), "no sample is there twice"
    return dict(held)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.lists(st.binary(max_size=20), max_size=60), st.integers(1, 6), st.integers(0, 999))
def test_every_sample_comes_to_the_rank_that_is_to_hold_it(
    on_ranks: OnRanks, ranks: int, contents: list[bytes], count: int, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    lengths = np.array([len(content) for content in contents], np.int32)
    begin = dice.integers(0, ranks * count, len(contents))  # the rank and the segment in which each begins
    rounds = [dice.integers(0, ranks, len(contents)).astype(np.int32) for _ in range(3)]

    def work(world: Any) -> list[dict[int, bytes]]:
        segments = [
            segment_of(np.flatnonzero(begin == world.rank * count + number).tolist(), contents)
            for number in range(count)
        ]
        held, shelf = [], None
        for holders in rounds:
            shelf = shuffle(world, segments, holders, lengths, shelf)
            held.append(held_in(segments))
        return held

    for rank, held in enumerate(on_ranks(ranks, work)):
        for holders, found in zip(rounds, held, strict=True):
            assert found == {number: contents[number] for number in np.flatnonzero(holders == rank).tolist()}


def test_a_segment_is_all_that_is_exchanged_at_once(on_ranks: OnRanks) -> None:
    contents = [bytes([number] * 10) for number in range(64)]
    lengths = np.full(64, 10, np.int32)

    def work(world: Any) -> int:
        most = 0
        exchange = world.exchange

        def counted(sends: list[Any], receives: list[Any]) -> None:
            nonlocal most
            most = max(most, sum(part.nbytes for part in sends))
            exchange(sends, receives)

        world.exchange = counted
        first = 16 * world.rank
        segments = [segment_of(list(range(at, at + 4)), contents) for at in range(first, first + 16, 4)]
        shuffle(world, segments, (np.arange(64) % 4).astype(np.int32), lengths)
        return most

    assert on_ranks(4, work) == [40] * 4
