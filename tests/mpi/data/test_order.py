"""Interval and scope of the shuffle on real ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.shuffle.traffic import epochs_traffic

from unisono.data.options import DataOptions
from unisono.data.order import epoch_order, parse_shuffle, share, steps_of
from unisono.data.pack.index import read_index
from unisono.data.storage.partitioned import PartitionedStorage
from unisono.data.storage.replicated import ReplicatedStorage
from unisono.placement import place
from unisono.world import World

BATCH, SEED, EPOCHS = 12, 4, 5


@pytest.fixture
def switched(world: World) -> Iterator[World]:
    """All ranks, as if each sat on a node of its own and the nodes under two switches by turns."""
    comm = world.comm.Dup()
    placement = place(range(world.size), [rank % 2 for rank in range(world.size)])
    switched = World(comm, placement, world.table)
    yield switched
    switched.free()


@pytest.mark.parametrize("shuffle", ["epoch", "every:2", "every:3,parts:2", "once"])
def test_each_rank_sees_each_epoch_as_if_it_had_all(group: World, spread: World, packs: Path, shuffle: str) -> None:
    index, options = read_index(packs / "train"), parse_shuffle(shuffle)
    for world in (group, spread):
        storages = PartitionedStorage(index, world, DataOptions()), ReplicatedStorage(index, world)
        for epoch in range(EPOCHS):
            order = epoch_order(len(index), BATCH, SEED, epoch, options)
            mine = [share(order, BATCH, step, world.rank, world.size) for step in range(steps_of(len(index), BATCH))]
            seen = [sample for numbers in world.all_gather_object(np.concatenate(mine).tolist()) for sample in numbers]
            assert sorted(seen) == list(range(len(index)))
            for storage in storages:
                storage.epoch(order, BATCH)
            for numbers in mine:
                contents = [[sample.tobytes() for sample in storage.samples(numbers)] for storage in storages]
                assert contents[0] == contents[1]
        for storage in storages:
            storage.close()


@pytest.mark.parametrize("shuffle", ["epoch", "every:2", "every:2,parts:2"])
def test_predicted_traffic_is_that_of_real_ranks(
    switched: World, packs: Path, shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, options, world = read_index(packs / "train"), parse_shuffle(shuffle), switched
    for groups in {1, 2 if world.size % 2 == 0 else 1, world.size}:
        storage, counted = PartitionedStorage(index, world, DataOptions(groups=groups)), []
        group = storage._group
        ranks = group.all_gather_object(world.rank)
        supernodes = [world.placement.supernode_of(rank) for rank in ranks]
        send, sent = group.all_to_all_v, np.zeros(2, np.int64)

        def count(
            sends: Sequence[torch.Tensor],
            receives: Sequence[torch.Tensor],
            ranks: list[int] = ranks,
            supernodes: list[int] = supernodes,
            send: object = send,
            sent: np.ndarray = sent,  # type: ignore[type-arg]
        ) -> None:
            for rank, supernode, part in zip(ranks, supernodes, sends, strict=True):
                sent[:] += part.nbytes * np.array([rank != world.rank, supernode != world.supernode])
            send(sends, receives)  # type: ignore[operator]

        monkeypatch.setattr(group, "all_to_all_v", count)
        for epoch in range(EPOCHS):
            sent[:] = 0
            storage.epoch(epoch_order(len(index), BATCH, SEED, epoch, options), BATCH)
            counted.append(tuple(sum(each) for each in zip(*world.all_gather_object(sent.tolist()), strict=True)))
        expected = epochs_traffic(index.length, BATCH, SEED, EPOCHS, options, world.placement, groups)
        assert counted == [(traffic.ranks, traffic.uplinks) for traffic in expected]
        storage.close()
