"""A pack that is read from its stripes. In one process: each rank a thread."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.feed import is_same_data
from unisono.data.kinds import RAW
from unisono.data.options import MEGABYTE, DataOptions
from unisono.data.order import ShuffleOptions, permutation, share, steps_of
from unisono.data.pack import packing
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.pack.stripe import OpenStripes
from unisono.data.sources import Source
from unisono.data.storage import free_memory
from unisono.data.storage.streamed import StreamedStorage, choose_cached
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

SAMPLES, BLOCK = 400, 5
"""Samples of 2 bytes, 5 in each block."""

BLOCKS = SAMPLES // BLOCK


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return packed(tmp_path_factory.mktemp("packs") / "small", 8)


def packed(folder: Path, stripes: int) -> Any:
    samples = [key.to_bytes(2, "little") for key in range(SAMPLES)]
    sizes, keys = np.full(SAMPLES, 2), [str(key) for key in range(SAMPLES)]
    labels = np.arange(SAMPLES) // 100
    source = Source(RAW, ("a", "b", "c", "d"), keys, labels, sizes, samples.__getitem__, (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_BYTES", 2 * BLOCK)
        return pack(source, folder, PackOptions(stripes=stripes), 1, lambda: None)


def numbers_in(samples: list[Any]) -> list[int]:
    return [int.from_bytes(sample.tobytes(), "little") for sample in samples]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=3),
    st.integers(5, 60),
    st.sampled_from([20, 100, 300, 1 << 20]),
    st.integers(0, 5),
)
def test_any_ranks_in_turn_read_each_sample_of_an_epoch_once(
    on_ranks: OnRanks, index: Any, legs: list[tuple[int, int]], batch: int, window: int, epoch: int
) -> None:
    step, steps, seen = 0, steps_of(SAMPLES, batch), list[int]()
    for ranks, count in [*legs, (2, steps)]:
        last = min(steps, step + count)

        def work(world: Any, first: int = step, last: int = last) -> list[list[int]]:
            storage = StreamedStorage(index, world, DataOptions(buffer_megabytes=window / MEGABYTE))
            order = storage.order(4, epoch, batch, ShuffleOptions())
            storage.epoch(order, batch, first)
            shares = [share(order, batch, at, world.rank, world.size) for at in range(first, last)]
            samples = [numbers_in(storage.samples(numbers)) for numbers in shares]
            assert samples == [numbers.tolist() for numbers in shares]
            storage.close()
            assert storage.nbytes == 0
            return samples

        seen += [sample for its in zip(*on_ranks(ranks, work), strict=True) for part in its for sample in part]
        step = last
    assert sorted(seen) == list(range(SAMPLES))


def test_a_rank_reads_its_own_samples_in_epochs_of_its_own(on_ranks: OnRanks, index: Any) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a collective was called")

    def work(world: Any) -> list[int]:
        storage = StreamedStorage(index, world, DataOptions(buffer_megabytes=100 / MEGABYTE))
        own = storage.own(permutation(SAMPLES, 5, 0))
        for name in ("all_gather_object", "all_to_all", "all_to_all_v", "split", "free"):
            setattr(world, name, refuse)
        assert numbers_in(storage.samples(own)) == own.tolist(), "before any epoch, too"
        orders = [storage.own_epoch(5, epoch, 7, 0) for epoch in (0, 1)]
        assert [sorted(order) for order in orders] == [own.tolist()] * 2
        assert orders[0].tolist() != orders[1].tolist()
        resumed = storage.own_epoch(5, 1, 7, 2)
        assert resumed.tolist() == orders[1].tolist()
        for step in range(2, steps_of(len(own), 7)):
            numbers = resumed[step * 7 : step * 7 + 7]
            assert numbers_in(storage.samples(numbers)) == numbers.tolist()
        assert storage.nbytes == 0, "all that was read ahead was used"
        storage.close()
        return own.tolist()

    assert sorted(sample for own in on_ranks(3, work) for sample in own) == list(range(SAMPLES))


def test_a_rank_holds_its_part_of_two_windows(on_ranks: OnRanks, index: Any) -> None:
    def work(world: Any) -> None:
        storage = StreamedStorage(index, world, DataOptions(buffer_megabytes=200 / MEGABYTE))
        order = storage.order(0, 0, 20, ShuffleOptions())
        storage.epoch(order, 20)
        for step in range(steps_of(SAMPLES, 20)):
            assert storage.nbytes <= 2 * (50 + 2 * 2 * BLOCK)
            storage.samples(share(order, 20, step, world.rank, world.size))
        storage.close()

    on_ranks(4, work)


def test_the_next_epoch_is_read_before_it_begins(
    on_ranks: OnRanks, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[int]()

    def counting(stripes: OpenStripes, first: int, last: int) -> Any:
        reads.append(first)
        return read(stripes, first, last)

    read = OpenStripes.read
    monkeypatch.setattr(OpenStripes, "read", counting)

    def work(world: Any) -> None:
        storage, other = (StreamedStorage(index, world, DataOptions(buffer_megabytes=200 / MEGABYTE)) for _ in range(2))
        orders = [other.order(0, epoch, 20, ShuffleOptions()) for epoch in range(3)]
        order = storage.order(0, 0, 20, ShuffleOptions())
        for epoch in range(2):
            storage.epoch(order, 20)
            for step in range(steps_of(SAMPLES, 20)):
                storage.samples(order[20 * step : 20 * (step + 1)])
            until = time.monotonic() + 60
            while len(reads) == BLOCKS * (epoch + 1) and time.monotonic() < until:  # the order is made by a thread
                storage.samples(np.empty(0, np.int64))
            assert BLOCKS * (epoch + 1) < len(reads) < BLOCKS * (epoch + 2)
            order = storage.order(0, epoch + 1, 20, ShuffleOptions())
            assert order.tolist() == orders[epoch + 1].tolist()
        storage.epoch(orders[0], 20)  # another than was expected: nothing of what was read ahead is handed out
        assert numbers_in(storage.samples(orders[0][:20])) == orders[0][:20].tolist()
        storage.close()
        assert storage.nbytes == 0
        other.close()

    on_ranks(1, work)


def test_another_window_or_layout_is_another_order_and_says_so(on_ranks: OnRanks, index: Any, tmp_path: Path) -> None:
    def work(world: Any) -> None:
        names, orders = list[str](), set[tuple[int, ...]]()
        for its, window in ((index, 100), (index, 200), (packed(tmp_path / "pack", 4), 100)):
            storage = StreamedStorage(its, world, DataOptions(buffer_megabytes=window / MEGABYTE))
            orders.add(tuple(storage.order(0, 0, 20, ShuffleOptions()).tolist()))
            names.append(storage.order_name)
            storage.close()
            assert is_same_data(f"streamed in windows of {window} bytes", names[-1]), "older releases"
        assert len(orders) == len(set(names)) == 3

    on_ranks(1, work)


def test_a_node_without_memory_for_the_windows_is_refused(
    on_ranks: OnRanks, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: 100)
    with pytest.raises(PackError, match="but its ranks would hold"):
        on_ranks(2, lambda world: StreamedStorage(index, world, DataOptions(buffer_megabytes=200 / MEGABYTE)))
    on_ranks(2, lambda world: StreamedStorage(index, world, DataOptions(buffer_megabytes=8 / MEGABYTE)).close())


def copy_of(index: Any, folder: Path, stripe: int = -1) -> tuple[Any, Path]:
    """A copy of the pack, and its last or another stripe."""
    shutil.copytree(index.folder, folder)
    return replace(index, folder=folder), sorted(folder.glob("stripe-*"))[stripe]


@pytest.mark.parametrize("stripe", [0, -1])
def test_a_stripe_that_a_node_lacks_is_found_before_the_first_step(
    on_ranks: OnRanks, index: Any, tmp_path: Path, stripe: int
) -> None:
    own, missing = copy_of(index, tmp_path / "copy", stripe)
    missing.unlink()

    def work(world: Any) -> str:
        with pytest.raises(PackError) as caught:
            StreamedStorage(own if world.rank == 1 else index, world, DataOptions(buffer_megabytes=200 / MEGABYTE))
        return str(caught.value)

    (message,) = set(on_ranks(3, work))
    assert message == f"rank 1: {own.folder} is incomplete: {missing.name} is missing; copy the pack again"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is incomplete: .* is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "has .* bytes, but .* were written"),
        (lambda path: path.write_bytes(path.read_bytes()[:600] + bytes(path.stat().st_size - 600)), "is damaged"),
    ],
    ids=["missing", "short", "damaged"],
)
def test_a_stripe_that_breaks_during_training_is_named(
    on_ranks: OnRanks, index: Any, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    """The epochs are read once before; then the last stripe breaks."""
    own, last = copy_of(index, tmp_path / "copy")

    def work(world: Any) -> None:
        storage = StreamedStorage(own, world, DataOptions(buffer_megabytes=40 / MEGABYTE))
        for epoch in (0, 1):
            order = storage.order(0, epoch, 20, ShuffleOptions())
            if epoch:
                damage(last)
            storage.epoch(order, 20)
            for step in range(steps_of(SAMPLES, 20)):
                storage.samples(share(order, 20, step, world.rank, world.size))

    with pytest.raises(PackError, match=message) as caught:
        on_ranks(1, work)
    assert last.name in str(caught.value)


SIZES = st.lists(st.integers(0, 1000), max_size=40).map(lambda sizes: np.array(sizes, np.int64))


@given(SIZES, st.integers(0, 50_000))
def test_any_stretch_of_the_pack_has_its_part_of_the_cache(nbytes: np.ndarray, allowed: int) -> None:
    cached = choose_cached(nbytes, allowed)
    share = min(1.0, allowed / max(1, int(nbytes.sum())))
    assert nbytes[cached].sum() <= allowed
    due, held = share * nbytes.cumsum(), np.where(cached, nbytes, 0).cumsum()
    assert (held <= due + 1e-6).all()
    assert (held > due - int(nbytes.max(initial=0)) - 1e-6).all() or not len(nbytes)


@given(SIZES, st.integers(0, 5))
def test_a_cache_as_large_as_the_pack_holds_all_of_it(nbytes: np.ndarray, more: int) -> None:
    assert choose_cached(nbytes, int(nbytes.sum()) + more).tolist() == (nbytes > 0).tolist()


def test_the_picture() -> None:
    nine = np.full(9, 4_000_000)
    assert np.flatnonzero(choose_cached(nine, 12_000_000)).tolist() == [2, 5, 8]
    assert not choose_cached(nine, 3_999_999).any()
