"""DIMD's three calls in one process: each rank a thread; tests/mpi/data has them on real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.data import dimd, partitioned_load
from unisono.data.kinds import RAW
from unisono.data.loading import Batch
from unisono.data.options import DataOptions
from unisono.data.order import permutation, share
from unisono.data.pack.index import read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.data.storage import choose
from unisono.errors import PackError, UsageError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

SAMPLES = 151


def kept(batch: Batch) -> Batch:
    return batch[0].clone(), batch[1]


def numbers_of(batch: Batch, folder: Path) -> list[int]:
    """What the first two pixels say."""
    about = read_index(folder / "train").about
    pixels = ((batch[0][:, 0, 0, :2] * about.std[0] + about.mean[0]) * 255).round()
    return (pixels[:, 0] + 256 * pixels[:, 1]).int().tolist()


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (3, 1), (3, 3), (4, 2)])
def test_each_group_has_each_sample_once_after_any_shuffle(
    on_ranks: OnRanks, numbered: Path, ranks: int, groups: int
) -> None:
    def work(world: Any) -> list[list[int]]:
        with partitioned_load(numbered, world, groups=groups) as data:
            assert data.samples == SAMPLES
            numbers = [data.numbers.tolist()]
            for _ in range(3):
                data.shuffle()
                numbers.append(data.numbers.tolist())
            return numbers

    members = ranks // groups
    for held in zip(*on_ranks(ranks, work), strict=True):
        for first in range(0, ranks, members):
            assert sorted(sample for own in held[first : first + members] for sample in own) == list(range(SAMPLES))


def test_a_shuffle_is_a_permutation_of_all_samples(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> list[list[int]]:
        with partitioned_load(numbered, world, groups=1, seed=9) as data:
            numbers = []
            for _ in range(2):
                data.shuffle()
                numbers.append(data.numbers.tolist())
            return numbers

    for rank, shuffles in enumerate(on_ranks(3, work)):
        for shuffle, held in enumerate(shuffles, start=1):
            assert held == sorted(share(permutation(SAMPLES, 9, shuffle), SAMPLES, 0, rank, 3).tolist())


def test_random_batches_are_of_this_rank_and_a_function_of_the_seed(on_ranks: OnRanks, numbered: Path) -> None:
    """With crops at random; batches of two lengths, before and after a shuffle."""
    about = read_index(numbered / "train")

    def work(world: Any, seed: int, augment: str = "shift") -> list[Batch]:
        with partitioned_load(numbered, world, groups=1, seed=seed, augment=augment, threads=2) as data:
            batches = []
            for length in (4, 4, 7, 4, 40, 40):
                batches.append(kept(data.random_batch(length)))
                assert len(batches[-1][1]) == length
                if augment == "none":
                    numbers = numbers_of(batches[-1], numbered)
                    assert len(set(numbers)) == length
                    assert set(numbers) <= set(data.numbers.tolist())
                    assert batches[-1][1].tolist() == about.label[numbers].tolist()
                if length == 7:
                    data.shuffle()
            return batches

    def equal(some: list[Batch], others: list[Batch]) -> list[bool]:
        return [torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(some, others, strict=True)]

    on_ranks(3, lambda world: work(world, 1, "none"))
    first, again, other = (on_ranks(3, lambda world, seed=seed: work(world, seed)) for seed in (1, 1, 2))
    for rank in range(3):
        assert all(equal(first[rank], again[rank]))
        assert not any(equal(first[rank], other[rank]))
        assert not any(equal(first[rank], first[rank - 1]))


def test_the_crops_of_a_sample_change(on_ranks: OnRanks, numbered: Path) -> None:
    """A rank that holds all samples, and takes all of them in each batch."""

    def work(world: Any) -> None:
        with partitioned_load(numbered, world, groups=1, augment="shift") as data:
            first, second = (kept(data.random_batch(SAMPLES)) for _ in range(2))
            rows = first[1].argsort(stable=True), second[1].argsort(stable=True)
            sums = [
                batch[0][row].sum((1, 2, 3)).sort().values for batch, row in zip((first, second), rows, strict=True)
            ]
            assert not torch.allclose(*sums)

    on_ranks(1, work)


def test_each_draw_of_each_rank_has_other_crops(on_ranks: OnRanks, numbered: Path) -> None:
    """Ranks that all hold all samples, and draws that are not all of them."""

    def work(world: Any) -> list[torch.Tensor]:
        with partitioned_load(numbered, world, groups=2, augment="shift") as data:
            return [data.random_batch(60)[0].clone() for _ in range(2)]

    seen = [crop.numpy().tobytes() for batches in on_ranks(2, work) for batch in batches for crop in batch]
    assert len(seen) - len(set(seen)) < 10, "of 240 crops of 151 samples, a few are equal by chance"


def test_more_samples_than_a_rank_holds_are_refused(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        with partitioned_load(numbered, world, groups=1) as data:
            held = len(data.numbers)
            for samples in (0, held + 1):
                message = f"rank {world.rank} holds {held} samples, of which a batch of {samples} was asked; take 1 to "
                with pytest.raises(UsageError, match=message):
                    data.random_batch(samples)

    on_ranks(3, work)
    with pytest.raises(PackError, match=r"3 ranks cannot form 2 groups of one size; \[1, 3\] can be formed"):
        on_ranks(3, lambda world: partitioned_load(numbered, world, groups=2))


def test_what_is_closed_says_so(on_ranks: OnRanks, numbered: Path) -> None:
    def work(world: Any) -> None:
        data = partitioned_load(numbered, world, groups=1)
        data.random_batch(4)
        data.close()
        for call in (lambda: data.random_batch(4), data.shuffle):
            with pytest.raises(UsageError, match="this InMemoryPartition is closed; make another one"):
                call()

    on_ranks(1, work)


@pytest.mark.parametrize("shuffle", ["every:4", "nonsense"])
def test_an_interval_of_shuffles_is_refused(on_ranks: OnRanks, numbered: Path, shuffle: str) -> None:
    with pytest.raises(
        UsageError, match=rf'shuffle = "{shuffle}": samples move when shuffle\(\) is called; take Loader'
    ):
        on_ranks(1, lambda world: partitioned_load(numbered, world, shuffle=shuffle))


def test_a_pack_that_does_not_fit_is_refused(
    on_ranks: OnRanks, numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = DataOptions(storage="streamed"), "partitions would take 9 GB"
    monkeypatch.setattr(choose, "resolve_storage", lambda *_: chosen)
    with pytest.raises(PackError, match="does not fit: partitions would take 9 GB; take Loader, which streams it"):
        on_ranks(2, lambda world: partitioned_load(numbered, world))


def test_the_worked_example(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert dimd.__doc__ is not None
    source = Source(RAW, ("one",), list("abcdefgh"), [0] * 8, [4] * 8, lambda _: b"abcd", (2, 2))
    for part in ("train", "test"):
        pack(source, tmp_path / part, PackOptions(stripes=1), 1, lambda: None)

    def work(world: Any, groups: int) -> tuple[list[int], list[int]]:
        with partitioned_load(tmp_path, world, groups=groups) as data:
            loaded = data.numbers.tolist()
            data.shuffle()
            return loaded, data.numbers.tolist()

    def shown(line: str) -> list[list[int]]:
        (text,) = re.findall(rf"    {line} +(.*)", dimd.__doc__)
        parts = re.split(r"rank \d:|  +", text)
        return [[int(sample) for sample in part.split()] for part in parts if part.strip()]

    one_group, two_groups = on_ranks(4, lambda world: work(world, 1)), on_ranks(4, lambda world: work(world, 2))
    assert [loaded for loaded, _ in one_group] == shown("groups = 1")
    assert [shuffled for _, shuffled in one_group] == shown("shuffled")
    assert [loaded for loaded, _ in two_groups] == shown("groups = 2")
