"""Batches for loops that others wrote, in one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from unisono.data import Loader
from unisono.data.kinds.text import TextOptions
from unisono.data.loader import BatchDataset
from unisono.data.loading import Batch
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import UsageError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH, STEPS = 16, 9
"""Of 151 samples: nine whole steps, and a short one."""


def loader_of(numbered: Path, world: Any, batch: int = BATCH) -> Loader:
    return Loader(numbered, world, batch, seed=4, augment="shift")


def same(some: list[Batch], others: list[Batch]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(some, others, strict=True)
    )


def epochs_of(loader: Loader, epochs: int) -> list[list[Batch]]:
    """The whole steps of the first epochs, copied as they come."""
    return [[(inputs.clone(), labels) for inputs, labels in loader][:STEPS] for _ in range(epochs)]


def test_whole_batches_are_collected_though_the_loader_uses_its_memory_again(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            expected = epochs_of(loader, 3)
        with loader_of(numbered, world) as loader:
            dataset = loader.dataset()
            assert len(dataset) == STEPS
            epochs = [list(dataset) for _ in range(3)]
            assert (loader.epoch, loader.step) == (3, 0)
        assert all(map(same, epochs, expected))
        assert {len(labels) for batches in epochs for _, labels in batches} == {BATCH // world.size}
        with loader_of(numbered, world) as loader:
            assert not same(list(loader)[:STEPS], expected[0]), "a loader's own batches would be overwritten"

    on_ranks(2, work)


def test_labels_of_texts_have_memory_of_their_own(on_ranks: OnRanks, tmp_path: Path) -> None:
    """They lie beside the inputs, in memory that the loader uses again."""
    (tmp_path / "text.txt").write_text("".join(map(str, range(500))))
    for name, part in find(tmp_path / "text.txt", TextOptions(window=4)).items():
        pack(part, tmp_path / "pack" / name, PackOptions(stripes=3), 1, lambda: None)

    def work(world: Any) -> None:
        with Loader(tmp_path / "pack", world, 8) as loader:
            expected = [(inputs.clone(), labels.clone()) for inputs, labels in loader]
            assert all(each.is_contiguous() for batch in loader for each in batch), "a loss may call view(-1)"
            loader.set_epoch(0)
            assert same(list(loader.dataset()), expected[: loader.samples // 8])

    on_ranks(2, work)


@pytest.mark.parametrize("ahead", [0, 1])
def test_loops_that_stop_at_the_length_begin_the_next_epoch(on_ranks: OnRanks, numbered: Path, ahead: int) -> None:
    """Loops count batches and never ask for one more; some begin the next epoch by its number."""

    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            expected = epochs_of(loader, 3)
        with loader_of(numbered, world) as loader:
            dataset = loader.dataset()
            epochs = []
            for epoch in range(3):
                if ahead:
                    dataset.set_epoch(epoch)
                epochs.append(list(islice(dataset, len(dataset))))
        assert all(map(same, epochs, expected))

    on_ranks(2, work)


@pytest.mark.parametrize("steps", [0, 3, STEPS, STEPS + 2])
def test_it_is_resumed_after_any_batch(on_ranks: OnRanks, numbered: Path, steps: int) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            expected = [batch for batches in epochs_of(loader, 2) for batch in batches]
        with loader_of(numbered, world) as loader:
            dataset, batches = loader.dataset(), list[Batch]()
            while len(batches) < steps:
                batches += islice(dataset, steps - len(batches))
            state = dataset.state_dict()
        with loader_of(numbered, world) as loader:
            dataset = loader.dataset()
            dataset.load_state_dict(state)
            assert (loader.epoch, loader.step) == divmod(steps, STEPS)
            while len(batches) < 2 * STEPS:
                batches += islice(dataset, 2 * STEPS - len(batches))
        assert same(batches, expected)

    on_ranks(2, work)


def test_a_data_loader_takes_it(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            (expected,) = epochs_of(loader, 1)
        with loader_of(numbered, world) as loader:
            batches = DataLoader(loader.dataset(("pixel_values", "labels")), batch_size=None)
            assert len(batches) == STEPS
            collected = list(batches)
            assert [list(batch) for batch in collected] == [["pixel_values", "labels"]] * STEPS
        assert same([(batch["pixel_values"], batch["labels"]) for batch in collected], expected)

    on_ranks(1, work)


def test_a_worker_process_is_refused(on_ranks: OnRanks, numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.data.loader.get_worker_info", lambda: "worker 0")

    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader, pytest.raises(UsageError, match="set num_workers=0, and decode"):
            next(iter(loader.dataset()))

    on_ranks(1, work)


def test_shares_of_different_lengths_are_refused(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with loader_of(numbered, world) as loader:
            message = r"3 ranks share batches of 16 samples unevenly, .*; take a multiple of 3, or .*add_samples"
            with pytest.raises(UsageError, match=message):
                loader.dataset()
        message = "batches of 153 samples from 151 leave no whole step"
        with loader_of(numbered, world, 153) as loader, pytest.raises(UsageError, match=message):
            loader.dataset()

    on_ranks(3, work)


def test_it_is_no_data_loader() -> None:
    """Libraries share the samples of a DataLoader among ranks; what is none, they leave as it is."""
    assert issubclass(BatchDataset, torch.utils.data.IterableDataset)
    assert not issubclass(BatchDataset, DataLoader)
