"""Threads that read ahead, with reads that the test lets go on. In one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import epoch_rng, share, steps_of
from unisono.data.storage import streamed
from unisono.data.storage.streamed import ReadAhead, Samples
from unisono.data.storage.streamed_order import (
    VIEW_BYTES,
    ReadPlan,
    StripeBlocks,
    memory_limit,
    plan_reads,
    reads_that_fit,
    seen_by,
    streamed_order,
)
from unisono.errors import PackError


class Disk:
    """Blocks of 4 samples of a byte, sample i of block b is 4 b + i; a read waits until it is let go on."""

    def __init__(self) -> None:
        self.begun, self.lock = list[int](), threading.Lock()
        self.free, self.broken = threading.Event(), set[int]()
        self.free.set()

    def read(self, block: int) -> Samples:
        with self.lock:
            self.begun.append(block)
        assert self.free.wait(60)
        if block in self.broken:
            raise PackError(f"{self.name(block)} is damaged")
        return list(np.arange(4 * block, 4 * block + 4, dtype=np.uint8).reshape(4, 1))

    def name(self, block: int) -> str:
        return f"stripe {block // 2}"


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.free.set()


def plan_of(*blocks: int, uses: int = 4) -> ReadPlan:
    count = len(blocks)
    return ReadPlan(np.array(blocks, np.int64), np.full(count, uses), np.full(count, 4))


def taken(reader: ReadAhead, *numbers: int) -> list[int]:
    wanted = np.array(numbers, np.int64)
    return [int(sample[0]) for sample in reader.take(wanted // 4, wanted % 4)]


def test_samples_in_any_order_within_blocks(disk: Disk) -> None:
    reader = ReadAhead(plan_of(3, 0, 2), disk.read, disk.name, 12)
    for numbers in ((13, 2, 12), (3, 14, 9), (8, 0, 15), (1, 11, 10)):
        assert taken(reader, *numbers) == list(numbers)
    assert sorted(disk.begun) == [0, 2, 3], "each block is read once"
    assert reader.nbytes == 0, "and dropped after its last sample"
    reader.stop()


def test_as_much_is_read_ahead_as_fits(disk: Disk) -> None:
    reader = ReadAhead(plan_of(0, 1, 2, 3), disk.read, disk.name, 8)
    assert reader.nbytes == 8
    assert taken(reader, 0, 1, 2) == [0, 1, 2]
    assert reader.nbytes == 8, "block 0 has a sample left"
    assert taken(reader, 3) == [3]
    assert reader.nbytes == 8, "block 2 is read in its place"
    assert taken(reader, *range(4, 16)) == list(range(4, 16))
    assert sorted(disk.begun) == [0, 1, 2, 3]
    assert reader.nbytes == 0
    reader.stop()


def test_what_a_step_needs_is_read_though_it_does_not_fit(disk: Disk) -> None:
    reader = ReadAhead(plan_of(0, 1, 2, uses=1), disk.read, disk.name, 0)
    assert reader.nbytes == 0
    assert taken(reader, 9, 5, 1) == [9, 5, 1]
    reader.stop()


def test_what_was_not_planned_is_read_for_one_call(disk: Disk) -> None:
    reader = ReadAhead(plan_of(0), disk.read, disk.name, 8)
    assert taken(reader, 20, 1) == [20, 1]
    assert taken(reader, 21) == [21]
    assert disk.begun.count(5) == 2
    reader.stop()


def test_an_error_of_a_read_is_raised_where_its_samples_are_taken(disk: Disk) -> None:
    disk.broken = {1}
    reader = ReadAhead(plan_of(0, 1, 2), disk.read, disk.name, 12)
    assert taken(reader, 0, 9) == [0, 9], "others are there"
    for _ in range(2):
        with pytest.raises(PackError, match="stripe 0 is damaged"):
            taken(reader, 5)
    reader.stop()


def test_a_file_that_does_not_answer_is_reported_once_and_the_step_goes_on(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streamed, "SLOW_SECONDS", 0.01)
    disk.free.clear()
    reader = ReadAhead(plan_of(4, 5), disk.read, disk.name, 12)
    waiting = threading.Timer(0.3, disk.free.set)
    waiting.start()
    assert taken(reader, 16, 20) == [16, 20], "both blocks are of one stripe"
    assert capsys.readouterr().err == "unisono: stripe 2 has not answered for 0 s; the step waits for it\n"
    reader.stop()


def test_a_file_that_never_answers_is_an_error(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streamed, "SLOW_SECONDS", 0.01)
    monkeypatch.setattr(streamed, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(streamed, "JOIN_SECONDS", 0.01)
    disk.free.clear()
    reader = ReadAhead(plan_of(4), disk.read, disk.name, 12)
    with pytest.raises(PackError, match=r"stripe 2 has not answered for 0 s: .*; check it, then resume the run"):
        taken(reader, 16)
    assert capsys.readouterr().err.count("\n") == 1
    reader.stop()


def test_blocks_that_were_not_begun_are_not_read_after_the_end(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(streamed, "READING_THREADS", 1)
    disk.free.clear()
    reader = ReadAhead(plan_of(*range(10)), disk.read, disk.name, 99)
    reader.stop()
    disk.free.set()
    for thread in reader._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(disk.begun) <= 1


def even_blocks(blocks: int, samples: int, nbytes: int) -> StripeBlocks:
    firsts = np.arange(blocks) * samples
    return StripeBlocks(firsts, firsts + samples, np.arange(blocks) // 4, np.full(blocks, nbytes))


@given(st.integers(1, 200), st.integers(1, 30), st.integers(0, 8), st.integers(1, 9))
def test_a_rank_sees_its_shares(samples: int, batch: int, done: int, ranks: int) -> None:
    order = epoch_rng(0, 0).permutation(samples)
    for rank in range(ranks):
        steps = range(done, steps_of(samples, batch))
        expected = [sample for step in steps for sample in share(order, batch, step, rank, ranks)]
        assert seen_by(order, batch, done, rank, ranks).tolist() == expected


NONE = np.zeros(10, np.bool_)


def test_blocks_in_the_cache_take_the_memory_of_views_in_a_plan() -> None:
    cached = NONE.copy()
    cached[1] = True
    plan = plan_reads(even_blocks(10, 4, 7), np.array([5, 9, 6]), cached)
    assert plan.blocks.tolist() == [1, 2]
    assert plan.nbytes.tolist() == [4 * VIEW_BYTES, 7]


@given(st.lists(st.integers(0, 39), max_size=60))
def test_blocks_in_the_order_of_their_first_use(seen: list[int]) -> None:
    blocks = even_blocks(10, 4, 7)
    plan = plan_reads(blocks, np.array(seen, np.int64), NONE)
    expected = dict[int, int]()
    for sample in seen:
        expected[sample // 4] = expected.get(sample // 4, 0) + 1
    assert list(zip(plan.blocks.tolist(), plan.uses.tolist(), strict=True)) == list(expected.items())
    assert plan.nbytes.tolist() == [7] * len(expected)


@pytest.mark.parametrize(
    ("begun", "held", "limit", "expected"), [(0, 0, 12, 3), (1, 4, 12, 3), (1, 4, 3, 1), (2, 9, 12, 2), (4, 4, 99, 4)]
)
def test_reads_that_fit(begun: int, held: int, limit: int, expected: int) -> None:
    assert reads_that_fit(np.arange(0, 20, 4), begun, held, limit) == expected


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 9))
def test_within_the_limit_each_window_is_there_before_it_is_used(ranks: int, window: int, epoch: int) -> None:
    """Reads that are as fast as told: played step by step, a step never begins a read that it needs."""
    blocks, batch = even_blocks(48, 20, 100), 10
    order = streamed_order(blocks, batch, window * 100, epoch_rng(1, epoch))
    limit = memory_limit(blocks, window * 100, ranks)
    for rank in range(ranks):
        plan = plan_reads(blocks, seen_by(order, batch, 0, rank, ranks), np.zeros(len(blocks.firsts), np.bool_))
        turns = {block: turn for turn, block in enumerate(plan.blocks.tolist())}
        left, begun, held = plan.uses.copy(), 0, 0
        ends = np.concatenate([[0], plan.nbytes.cumsum()])
        for step in range(steps_of(len(order), batch)):
            fits = reads_that_fit(ends, begun, held, limit)
            held += int(plan.nbytes[begun:fits].sum())
            begun = max(begun, fits)
            assert held <= limit
            for block in blocks.find(share(order, batch, step, rank, ranks)).tolist():
                assert turns[block] < begun, "it was read ahead"
                left[turns[block]] -= 1
                held -= 100 * (left[turns[block]] == 0)
        assert not left.any()
        assert held == 0


def test_a_rank_needs_its_part_of_two_windows() -> None:
    blocks = even_blocks(1000, 40, 4 << 20)
    assert memory_limit(blocks, 1 << 30, 4) == 2 * ((256 << 20) + (8 << 20))
    assert memory_limit(even_blocks(3, 4, 5), 1 << 30, 4) == 15, "no more than the pack"
