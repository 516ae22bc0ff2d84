"""In one process: each rank a thread."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data import Loader
from unisono.data.feed import packed_feed
from unisono.data.loading import Batch
from unisono.data.options import DataOptions
from unisono.data.order import epoch_order, parse_shuffle, permutation
from unisono.data.pack.index import read_index
from unisono.errors import PackError, UsageError
from unisono.placement import place

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH, SEED, SAMPLES = 16, 4, 151
STEPS = 10


def loader_of(numbered: Path, world: Any, **options: Any) -> Loader:
    return Loader(numbered, world, BATCH, seed=SEED, **options)


def kept(batches: Any) -> list[Batch]:
    return [(inputs.clone(), labels) for inputs, labels in batches]


def numbers_in(everyone: list[list[Batch]], folder: Path) -> list[int]:
    """What the first two pixels say, step by step, of all ranks."""
    about = read_index(folder / "train").about
    numbers = []
    for step in zip(*everyone, strict=True):
        for inputs, _ in step:
            pixels = ((inputs[:, 0, 0, :2] * about.std[0] + about.mean[0]) * 255).round()
            numbers += (pixels[:, 0] + 256 * pixels[:, 1]).int().tolist()
    return numbers


def test_a_loop_gets_the_batches_of_a_run(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        options = DataOptions(pack=str(numbered), augment="shift")
        feed = packed_feed(options, world, SEED)
        expected = [kept(feed.epoch(epoch, BATCH, 0)) for epoch in range(2)]
        tested = kept(feed.test_batches(BATCH))
        feed.close()
        with loader_of(numbered, world, augment="shift", threads=2) as loader:
            assert (loader.samples, loader.test_samples, loader.classes, loader.channels) == (SAMPLES, 37, 5, 1)
            assert len(loader) == STEPS
            epochs = [kept(loader), kept(loader), kept(loader.test_batches())]
        for wanted, batches in zip([*expected, tested], epochs, strict=True):
            assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(wanted, batches, strict=True))

    on_ranks(3, work)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4),
    st.sampled_from(["epoch", "every:2", "once,parts:2"]),
)
def test_a_loop_that_stops_anywhere_is_resumed_on_any_number_of_ranks(
    on_ranks: OnRanks, numbered: Path, legs: list[tuple[int, int]], shuffle: str
) -> None:
    """Two epochs and more, in legs of so many steps on so many ranks: as if they had never stopped."""
    state: dict[str, Any] | None = None
    seen = list[int]()
    for ranks, steps in legs:

        def leg(world: Any, steps: int = steps, before: dict[str, Any] | None = state) -> tuple[list[Batch], str]:
            with loader_of(numbered, world, shuffle=shuffle) as loader:
                if before is not None:
                    loader.load_state_dict(before)
                batches = list[Batch]()
                while len(batches) < steps:
                    batches += kept(islice(loader, steps - len(batches)))
                return batches, json.dumps(loader.state_dict())

        of_ranks, states = zip(*on_ranks(ranks, leg), strict=True)
        assert len(set(states)) == 1
        state = json.loads(states[0])
        seen += numbers_in(list(of_ranks), numbered)
    steps = sum(steps for _, steps in legs)
    order = partial(epoch_order, SAMPLES, BATCH, SEED, shuffle=parse_shuffle(shuffle))
    orders = [order(epoch=epoch).tolist() for epoch in range(steps // STEPS + 1)]
    expected = [sample for order in orders[:-1] for sample in order] + orders[-1][: steps % STEPS * BATCH]
    assert seen == expected


def test_set_epoch_begins_another_epoch_and_leaves_the_current_one_where_it_stands(
    on_ranks: OnRanks, numbered: Path
) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            for _ in islice(loader, 3):
                pass
            loader.set_epoch(0)
            assert (loader.epoch, loader.step) == (0, 3)
            loader.set_epoch(5)
            assert (loader.epoch, loader.step) == (5, 0)
            fifth = kept(loader)
            assert (loader.epoch, loader.step) == (6, 0)
            loader.set_epoch(5)
            assert numbers_in([kept(loader)], numbered) == numbers_in([fifth], numbered)
            assert numbers_in([fifth], numbered) == permutation(SAMPLES, SEED, 5).tolist()

    on_ranks(1, work)


def test_the_batch_that_was_handed_out_counts_as_used(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            states = [loader.state_dict() for _ in loader]
            assert [state["step"] for state in states] == list(range(1, STEPS + 1))
            assert {state["epoch"] for state in states} == {0}
            loader.load_state_dict(states[-1])
            assert (loader.epoch, loader.step) == (1, 0), "nothing of epoch 0 is left"

    on_ranks(2, work)


@pytest.mark.parametrize("move", ["iter", "set_epoch", "load_state_dict"])
def test_a_loop_that_was_left_behind_says_so(on_ranks: OnRanks, numbered: Path, move: str) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            old = iter(loader)
            next(old)
            state = loader.state_dict()
            if move == "iter":
                next(iter(loader))
            elif move == "set_epoch":
                loader.set_epoch(3)
            else:
                loader.load_state_dict(state)
            with pytest.raises(UsageError, match="one loop at a time"):
                next(old)

    on_ranks(2, work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 8}, "the state has batch = 8, but this loader 16"),
        ({"seed": 9}, "the state has seed = 9, but this loader 4"),
        ({"data": "other"}, r"the state has data = 'other', but this loader .*set_epoch\(3\) without the state"),
        ({"step": 11}, "the state has step = 11, but an epoch 10 steps"),
        ({"step": 2.5}, "the state's step = 2.5; it is a whole number, 0 at least"),
        ({"epoch": -1}, "the state's epoch = -1; it is 0 at least"),
        ({"epoch": "3", "data": "other"}, "the state's epoch = '3'; it is a whole number, 0 at least"),
    ],
)
def test_a_state_under_which_samples_would_be_left_out_is_refused(
    on_ranks: OnRanks, numbered: Path, change: dict[str, Any], message: str
) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            with pytest.raises(UsageError, match=message):
                loader.load_state_dict({**loader.state_dict(), "epoch": 2, **change})
            assert (loader.epoch, loader.step) == (0, 0)

    on_ranks(1, work)


def test_what_cannot_be_loaded_is_refused(on_ranks: OnRanks, numbered: Path) -> None:
    with pytest.raises(UsageError, match="3 ranks share batches of 2 samples, so some would have none"):
        on_ranks(3, lambda world: Loader(numbered, world, 2))
    with pytest.raises(
        UsageError, match="virtual_ranks = 2, but 3 ranks, so some would have no samples: start at most 2"
    ):
        on_ranks(3, lambda world: loader_of(numbered, world, virtual_ranks=2))
    with pytest.raises(
        UsageError, match="storage = 'floppy'; it is one of partitioned, replicated, streamed, files, auto"
    ):
        on_ranks(1, lambda world: loader_of(numbered, world, storage="floppy"))
    with pytest.raises(PackError, match=r"data\.augment = 'mask'"):
        on_ranks(1, lambda world: loader_of(numbered, world, augment="mask"))


def test_an_error_in_a_loop_is_not_hidden_by_waiting_for_the_others(on_ranks: OnRanks, numbered: Path) -> None:
    """Closing is collective, so it is left out on the rank that fails."""

    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            next(iter(loader))
            if world.rank == 1:
                raise ValueError("mine")
            world.all_gather_object(None)

    with pytest.raises(ValueError, match="mine"):
        on_ranks(2, work)


def test_after_an_error_no_thread_reads_on(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        before = set(threading.enumerate())
        loader = loader_of(numbered, world, storage="streamed")
        batches = iter(loader)
        with pytest.raises(ValueError, match="mine"), loader:
            next(batches)
            raise ValueError("mine")
        left = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
        assert not left & {"reading", "decoding", "test decoding"}
        with pytest.raises(UsageError, match="this Loader is closed; make another one"):
            next(batches)
        loader.close()

    on_ranks(1, work)


def test_naming_it_imports_nothing() -> None:
    code = "import sys, unisono.data; print([name for name in ('torch', 'pyarrow', 'mpi4py') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_state_of_another_shuffle_or_of_none_is_refused(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world, shuffle="every:3") as loader:
            state = loader.state_dict()
            assert state["shuffle"] == "every:3"
        with loader_of(numbered, world) as loader:
            with pytest.raises(UsageError, match="the state has shuffle = 'every:3', but this loader 'epoch'"):
                loader.load_state_dict(state)
            del state["shuffle"]
            with pytest.raises(UsageError, match="the state has shuffle = None, but this loader 'epoch'"):
                loader.load_state_dict(state)

    on_ranks(2, work)


def test_a_state_of_an_older_release_is_known(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with Loader(numbered, world, BATCH) as loader:
            state = loader.state_dict()
            old = ", ".join(part.rpartition(" ")[0] for part in state["data"].split(", "))
            loader.load_state_dict({**state, "data": old})
            with pytest.raises(UsageError, match="the state has data = '0"):
                loader.load_state_dict({**state, "data": f"0{old}"})

    on_ranks(1, work)


def test_a_shuffle_that_crosses_switches_is_noted(on_ranks: OnRanks, numbered: Path) -> None:
    def notes(world: Any, **options: Any) -> tuple[str, ...]:
        world.placement = place(range(4), "abab")
        with loader_of(numbered, world, **options) as loader:
            return loader.notes

    assert on_ranks(4, notes) == [()] * 4
    lines = on_ranks(4, lambda world: notes(world, shuffle="once,parts:2"))
    assert all(line.startswith("shuffle: ranks 0 to 1 share a part") for (line,) in lines)
    assert on_ranks(4, lambda world: notes(world, groups=2)) == [()] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads = 0; it is 1 at least"),
        ({"groups": 0}, "Loader: groups = 0, but it has to be at least 1"),
        ({"storage": "streamed", "buffer_megabytes": 0}, "Loader: buffer_megabytes = 0.0, but it has to be at least 1"),
        ({"storage": "streamed", "cache_megabytes": -1}, "Loader: cache_megabytes = -1.0, but it has to be at least 0"),
        ({"size": -3}, "Loader: size = -3, but it has to be at least 0"),
        ({"windows": 0}, "Loader: windows = 0, but it has to be at least 1"),
        ({"seed": -1}, "seed = -1; it is 0 at least"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616; it is 18446744073709551615 at most"),
        ({"seed": 1.5}, "seed = 1.5; it is a whole number, 0 at least"),
        ({"batch": 0}, "batch = 0; it is 1 at least"),
        ({"batch": "16"}, "batch = '16'; it is a whole number, 1 at least"),
        ({"virtual_ranks": None}, "virtual_ranks = None; it is a whole number, 0 at least"),
        ({"storage": "replicated", "groups": 2}, 'groups = 2, but storage = "replicated"'),
    ],
)
def test_numbers_out_of_range_are_refused(
    on_ranks: OnRanks, numbered: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        on_ranks(1, lambda world: Loader(numbered, world, **{"batch": BATCH, **options}))


def test_numbers_of_numpy_are_numbers(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with Loader(numbered, world, np.int64(BATCH), seed=np.int64(SEED)) as loader:  # type: ignore[arg-type]
            loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
            assert numbers_in([kept(loader)], numbered) == permutation(SAMPLES, SEED, 2).tolist()
            assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()

    on_ranks(1, work)


def test_a_position_that_is_none_is_refused(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            with pytest.raises(UsageError, match="epoch = -1; it is 0 at least"):
                loader.set_epoch(-1)
            with pytest.raises(UsageError, match="epoch = '1'; it is a whole number, 0 at least"):
                loader.set_epoch("1")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="the state has no step, but epoch: give a state_dict"):
                loader.load_state_dict({"epoch": 1})
            assert (loader.epoch, loader.step) == (0, 0)

    on_ranks(1, work)


def test_a_loop_that_counts_its_batches_is_followed_by_the_next_epoch(on_ranks: OnRanks, numbered: Path) -> None:
    """Such a loop never asks for one more than the last: the epoch does not end by itself."""

    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            for epoch in range(3):
                batches = kept(islice(loader, len(loader)))
                assert (loader.epoch, loader.step) == (epoch, STEPS)
                assert numbers_in([batches], numbered) == permutation(SAMPLES, SEED, epoch).tolist()

    on_ranks(1, work)
