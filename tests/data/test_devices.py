"""Batches on a device: those of the host, whatever the program and the device do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.data import Loader
from unisono.data.loading import Batch
from unisono.errors import UsageError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH = 16


def on_host(batches: Any) -> list[Batch]:
    return [(inputs.cpu().clone(), labels.cpu().clone()) for inputs, labels in batches]


def equal(batches: list[Batch], expected: list[Batch]) -> bool:
    pairs = zip(batches, expected, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_batches_arrive_on_it_beside_the_programs_work(on_ranks: OnRanks, numbered: Path, device: torch.device) -> None:
    def work(world: Any) -> None:
        options: dict[str, Any] = {"seed": 4, "augment": "shift", "threads": 2}
        with Loader(numbered, world, BATCH, **options) as loader:
            expected, tested = [on_host(loader) for _ in range(2)], on_host(loader.test_batches())
        with Loader(numbered, world, BATCH, **options, device=device) as loader:
            for epoch in expected:
                batches = list[Batch]()
                for inputs, labels in loader:  # nobody waits: all are read behind the last, and the batches dropped
                    assert inputs.device == labels.device == device
                    assert inputs.is_contiguous(memory_format=torch.channels_last)
                    batches.append((2 * inputs, labels + 1))
                    del inputs, labels
                assert equal(on_host(batches), [(2 * inputs, labels + 1) for inputs, labels in epoch])
            assert equal(on_host(loader.test_batches()), tested)

    on_ranks(1, work)


def test_a_loop_that_stops_is_resumed(on_ranks: OnRanks, numbered: Path, device: torch.device) -> None:
    def work(world: Any) -> None:
        with Loader(numbered, world, BATCH, seed=4) as loader:
            expected = on_host(loader)
        with Loader(numbered, world, BATCH, seed=4, device=str(device)) as loader:
            batches = list[Batch]()
            for batch in loader:
                batches += on_host([batch])
                if loader.step == 3:
                    state = loader.state_dict()
                    break
            loader.load_state_dict(state)
            assert equal(batches + on_host(loader), expected)

    on_ranks(1, work)


def test_a_dataset_of_another_library_gets_them_as_they_are(
    on_ranks: OnRanks, numbered: Path, device: torch.device
) -> None:
    def work(world: Any) -> None:
        with Loader(numbered, world, BATCH) as loader:
            expected = on_host(loader.dataset())
        with Loader(numbered, world, BATCH, device=device) as loader:
            batches = [(batch["x"], batch["y"]) for batch in loader.dataset(("x", "y"))]
            assert {tensor.device for batch in batches for tensor in batch} == {device}
            assert equal(on_host(batches), expected)

    on_ranks(1, work)


def test_a_rank_without_a_device_is_named(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with pytest.raises(UsageError, match=r'rank 0: device = "nothing:0" is no device'):
            Loader(numbered, world, BATCH, device="nothing:0")

    on_ranks(2, work)
