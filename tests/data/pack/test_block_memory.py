"""Memory that is used again. In one process."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.pack import block_memory
from unisono.data.pack.block_memory import BlockMemory


@pytest.fixture(autouse=True)
def small_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_memory, "UNIT", 64)


def place_of(memory: np.ndarray) -> int:
    return memory.ctypes.data


def test_memory_is_used_again_once_the_last_view_is_dropped() -> None:
    memory = BlockMemory()
    block = memory(100)
    place, view = place_of(block), block[10:20].view(np.uint8)[1:]
    buffer = memoryview(view)
    del block
    assert place_of(memory(100)) != place
    del view
    assert place_of(memory(100)) != place, "a buffer of a view refers to it"
    buffer.release()
    del buffer
    assert place_of(memory(90)) == place


def test_memory_is_writable_and_has_the_size_that_was_asked_for() -> None:
    memory = BlockMemory()
    for nbytes in (0, 1, 63, 64, 65, 1000):
        found = memory(nbytes)
        assert (len(found), found.flags.writeable) == (nbytes, True)
        found[:] = 7


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=40))
def test_views_in_use_never_overlap_and_no_more_is_held_than_was_in_use(events: list[tuple[bool, int]]) -> None:
    memory, held = BlockMemory(), list[np.ndarray]()
    most = 0
    for taken, number in events:
        if taken:
            held.append(memory(number)[:])
        elif held:
            held.pop(number % len(held))
        large = [len(view) for view in held if len(view) >= 64]
        most = max(most, sum(-(-nbytes // 64) * 64 for nbytes in large))
        spans = sorted((place_of(view), place_of(view) + len(view)) for view in held if len(view))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        spare = sum(len(each) for spares in memory._spare.values() for each in spares)
        assert spare <= 2 * most, "of twice the size that is needed, at most"


def test_memory_of_another_size_is_dropped_for_what_is_allocated() -> None:
    memory = BlockMemory()
    blocks = [memory(64) for _ in range(3)]
    del blocks
    gc.collect()
    large = memory(1000)
    assert [len(spares) for spares in memory._spare.values()] == [2]
    del large
    assert len(memory(300)) == 300, "more than twice the size is too large"
    assert sorted(len(each) for spares in memory._spare.values() for each in spares) == [64, 64, 320]


def test_threads_get_memory_of_their_own() -> None:
    memory = BlockMemory()
    wrong = list[int]()

    def work(own: int) -> None:
        for turn in range(300):
            block = memory(200 + own)
            block[:] = own
            views = [block[begin : begin + 50] for begin in (0, 50, 100)]
            del block
            if any((view != own).any() for view in views):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(memory._spare[256]) <= 4
