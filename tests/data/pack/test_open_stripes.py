"""Stripes that stay open. In one process; `test_stripe.py` tests damaged stripes."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.kinds import RAW
from unisono.data.pack import packing, stripe
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.pack.stripe import BlockMemory, OpenStripes, StripeFile
from unisono.data.sources import Source
from unisono.errors import PackError

SAMPLES, BLOCK, STRIPES = 60, 5, 4


@pytest.fixture
def index(tmp_path: Path) -> Any:
    samples = [key.to_bytes(2, "little") for key in range(SAMPLES)]
    sizes, keys = np.full(SAMPLES, 2), [str(key) for key in range(SAMPLES)]
    source = Source(RAW, ("a",), keys, np.zeros(SAMPLES, np.int64), sizes, samples.__getitem__, (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_BYTES", 2 * BLOCK)
        return pack(source, tmp_path / "pack", PackOptions(stripes=STRIPES), 1, lambda: None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the stripes that were opened."""
    stripes, create = list[int](), StripeFile.__init__

    def counting(self: StripeFile, path: Path, identity: tuple[int, int, int], *others: Any) -> None:
        stripes.append(identity[0])
        create(self, path, identity, *others)

    monkeypatch.setattr(StripeFile, "__init__", counting)
    return stripes


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    yield
    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} <= before


def read(stripes: OpenStripes, first: int, last: int) -> list[int]:
    samples = [
        data[begin:end].tobytes()
        for data, offsets in stripes.read(first, last)
        for begin, end in pairwise(offsets.tolist())
    ]
    return [int.from_bytes(sample, "little") for sample in samples]


def test_each_stripe_is_opened_once(index: Any, opened: list[int]) -> None:
    stripes = OpenStripes(index)
    for first, last in ((0, 60), (58, 60), (3, 31), (0, 60)):
        assert read(stripes, first, last) == list(range(first, last))
    assert opened == [0, 1, 2, 3]
    stripes.close()


def test_no_more_stay_open_than_the_limit(index: Any, opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe, "KEPT_STRIPES", 2)
    stripes = OpenStripes(index)
    assert read(stripes, 0, 60) == list(range(60))
    assert len(stripes._idle) == 2
    assert read(stripes, 45, 60) == list(range(45, 60)), "the last is open"
    assert opened == [0, 1, 2, 3]
    assert read(stripes, 0, 5) == list(range(5))
    assert opened == [0, 1, 2, 3, 0]
    stripes.close()


def test_a_read_is_one_request_and_nothing_is_copied(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe, "UNIT", 64)
    stripes, requests, leases = OpenStripes(index), list[int](), list[Any]()
    assert read(stripes, 0, 5) == [0, 1, 2, 3, 4]
    readinto, memory = stripe.StripeFile.readinto, stripes._memory

    def counting(file: Any, buffer: memoryview) -> int | None:
        requests.append(len(buffer))
        return readinto(file, buffer)

    def lending(nbytes: int) -> Any:
        leases.append(memory(nbytes))
        return leases[-1]

    monkeypatch.setattr(stripe.StripeFile, "readinto", counting)
    stripes._idle[0]._memory = lending
    ((data, _),) = stripes.read(5, 10)
    assert (len(requests), len(leases)) == (1, 1)
    assert np.shares_memory(data, leases[0])
    assert data.flags.writeable
    stripes.close()
    assert data.view(np.uint16).tolist() == [5, 6, 7, 8, 9], "samples outlive the file"


def test_memory_in_which_the_samples_do_not_lie_is_copied_from() -> None:
    data, memory = np.arange(9, dtype=np.uint8), np.zeros(100, np.uint8)
    data.flags.writeable = False
    for place in (memory, memory[:0], memory[:5]):
        view = stripe.writable(data, place)
        assert (view.tolist(), view.flags.writeable) == (list(range(9)), True)
    assert stripe.writable(memory[7:9], memory).base is not None


def test_a_stripe_that_was_replaced_is_opened_again(index: Any, opened: list[int], tmp_path: Path) -> None:
    stripes, path = OpenStripes(index), index.folder / index.about.stripes[0][0]
    assert read(stripes, 0, 5) == list(range(5))
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert read(stripes, 0, 5) == list(range(5))
    assert opened == [0, 0]
    stripes.close()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "is incomplete: stripe-00000.arrow is missing"),
        (lambda path: os.truncate(path, 100), "has 100 bytes, but"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), r"stripe-00000\.arrow is damaged"),
    ],
    ids=["missing", "short", "damaged"],
)
def test_an_open_stripe_that_breaks_is_named(index: Any, harm: Callable[[Path], Any], message: str) -> None:
    stripes, path = OpenStripes(index), index.folder / index.about.stripes[0][0]
    assert read(stripes, 0, 5) == list(range(5))
    harm(path)
    with pytest.raises(PackError, match=message):
        read(stripes, 0, 5)
    assert read(stripes, 20, 25) == list(range(20, 25)), "others can be read"
    stripes.close()


def test_a_stripe_that_is_cut_off_during_a_read_is_named(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stripes = OpenStripes(index)
    monkeypatch.setattr(stripe.StripeFile, "readinto", lambda file, buffer: 0)
    with pytest.raises(PackError, match=r"stripe-00000\.arrow is damaged: "):
        read(stripes, 0, 5)
    stripes.close()


def test_threads_read_one_stripe_at_once(index: Any, opened: list[int]) -> None:
    stripes, seen, together = OpenStripes(index), dict[int, list[int]](), threading.Barrier(3)

    def work(own: int) -> None:
        pieces = stripes.read(0, 10)
        numbers = next(pieces)[0].view(np.uint16).tolist()
        together.wait(60)  # all are in the middle of the stripe
        seen[own] = numbers + next(pieces)[0].view(np.uint16).tolist()
        assert next(pieces, None) is None

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {worker: list(range(10)) for worker in range(3)}
    assert opened == [0, 0, 0]
    stripes.close()


def test_a_stripe_that_is_read_while_the_rest_is_closed_is_closed_after_that(index: Any) -> None:
    stripes = OpenStripes(index)
    pieces = stripes.read(0, 10)
    next(pieces)
    stripes.close()
    assert next(pieces)[0].view(np.uint16).tolist() == [5, 6, 7, 8, 9]
    assert next(pieces, None) is None


@pytest.fixture(autouse=True)
def small_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe, "UNIT", 64)


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
        view = memory(nbytes)
        assert (len(view), view.flags.writeable) == (nbytes, True)
        view[:] = 7


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=40))
def test_views_in_use_never_overlap_and_no_more_is_held_than_was_in_use(events: list[tuple[bool, int]]) -> None:
    memory, held = BlockMemory(), list[np.ndarray]()
    most = 0
    for taken, amount in events:
        if taken:
            held.append(memory(amount)[:])
        elif held:
            held.pop(amount % len(held))
        large = [len(view) for view in held if len(view) >= 64]
        most = max(most, sum(-(-nbytes // 64) * 64 for nbytes in large))
        spans = sorted((place_of(view), place_of(view) + len(view)) for view in held if len(view))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        spare = sum(map(len, memory._spare))
        assert spare <= 2 * most, "of twice the size that is needed, at most"


def test_memory_of_another_size_is_dropped_for_what_is_allocated() -> None:
    memory = BlockMemory()
    blocks = [memory(64) for _ in range(3)]
    del blocks
    gc.collect()
    large = memory(1000)
    assert len(memory._spare) == 2
    del large
    assert len(memory(300)) == 300, "more than twice the size is too large"
    assert sorted(map(len, memory._spare)) == [64, 64, 320]


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

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(memory._spare) <= 2 * len(threads), "a thread has views of the block before and one more"
