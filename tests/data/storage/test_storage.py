"""The value that names a storage, and the form of a storage without collectives. In one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono.data.options import DataOptions
from unisono.data.order import permutation, share
from unisono.data.storage import read_storage
from unisono.errors import PackError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def test_an_unknown_storage_is_refused_with_those_that_there_are(on_ranks: OnRanks, tiny: Any) -> None:
    with pytest.raises(PackError, match="there is no storage 'floppy'; there are partitioned, replicated"):
        on_ranks(1, lambda world: read_storage(DataOptions(storage="floppy"), tiny.index, world))


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (4, 1), (6, 2), (3, 3)])
def test_the_ranks_of_a_partitioned_pack_own_each_sample_once(
    anywhere: OnRanks, tiny: Any, ranks: int, groups: int
) -> None:
    order = permutation(61, 5, 0)

    def work(world: Any) -> list[int]:
        storage = read_storage(DataOptions(groups=groups), tiny.index, world)
        own = storage.own(order)
        assert own.tolist() == sorted(share(order, 61, 0, world.rank, world.size).tolist())
        assert [sample.tobytes() for sample in storage.samples(own)] == [tiny.samples[sample] for sample in own]
        storage.close()
        return own.tolist()

    assert sorted(sample for numbers in anywhere(ranks, work) for sample in numbers) == list(range(61))


def test_own_samples_are_read_without_a_collective(on_ranks: OnRanks, tiny: Any) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a collective was called")

    def work(world: Any) -> None:
        storage = read_storage(DataOptions(), tiny.index, world)
        own = storage.own(permutation(61, 5, 0))
        for name in ("all_gather_object", "all_to_all", "all_to_all_v", "split", "free"):
            setattr(world, name, refuse)
        for _ in range(3):
            assert [sample.tobytes() for sample in storage.samples(own)] == [tiny.samples[sample] for sample in own]
        with pytest.raises(AssertionError, match="a collective was called"):
            storage.epoch(np.arange(61), 7)

    on_ranks(3, work)
