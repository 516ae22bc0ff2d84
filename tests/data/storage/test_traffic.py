"""Predicted traffic and the bytes that are counted where they are sent. In one process: each rank a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.shuffle.traffic import ShuffleTraffic, epochs_traffic, shuffle_traffic
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.options import DataOptions
from unisono.data.order import ShuffleOptions, epoch_order, parse_shuffle
from unisono.data.storage.partitioned import PartitionedStorage, form_groups
from unisono.data.storage.sample_store import block_of, blocks_of
from unisono.placement import Placement, one_rank_per_node, place, regular

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

BATCH = 16


def predicted(
    lengths: np.ndarray, placement: Placement, groups: int, shuffle: ShuffleOptions, epochs: int
) -> list[ShuffleTraffic]:
    return epochs_traffic(lengths, BATCH, 3, epochs, shuffle, placement, groups)


def counted(
    on_ranks: OnRanks, index: Any, placement: Placement, groups: int, shuffle: ShuffleOptions, epochs: int
) -> list[ShuffleTraffic]:
    """Traffic of each epoch, counted where samples are sent: from rank to rank of a group."""

    def work(world: Any) -> list[np.ndarray]:
        world.placement = placement
        storage = PartitionedStorage(index, world, DataOptions(groups=groups), 2000)
        group, sent = storage._group, np.zeros(placement.ranks // groups, np.int64)
        send = group.all_to_all_v

        def count(sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
            sent[:] += [part.nbytes for part in sends]
            send(sends, receives)

        group.all_to_all_v = count
        by_epoch, before = [], sent.copy()
        for epoch in range(epochs):
            storage.epoch(epoch_order(len(index), BATCH, 3, epoch, shuffle), BATCH)
            by_epoch.append(sent - before)
            before = sent.copy()
        ranks = group.all_gather_object(world.rank)
        storage.close()
        return [dict(zip(ranks, counts.tolist(), strict=True)) for counts in by_epoch]

    of_rank = on_ranks(placement.ranks, work)
    totals = []
    for epoch in range(epochs):
        pairs = [
            (sender, receiver, n) for sender, by_epoch in enumerate(of_rank) for receiver, n in by_epoch[epoch].items()
        ]
        places = (int, placement.node_of, placement.supernode_of)
        totals.append(
            ShuffleTraffic(*(sum(n for sender, receiver, n in pairs if at(sender) != at(receiver)) for at in places))
        )
    return totals


@pytest.mark.parametrize(
    ("placement", "groups", "shuffle"),
    [
        (one_rank_per_node(3), 1, "epoch"),
        (regular(2, 1, 2), 1, "epoch"),
        (regular(2, 2, 1), 1, "every:2"),
        (regular(2, 2, 1), 1, "every:3,parts:2"),
        (regular(2, 2, 1), 2, "epoch"),
        (place(range(8), [0, 1] * 4), 2, "epoch"),
        (place([0, 1, 0, 1, 2, 3], "ababab"), 1, "once,parts:3"),
    ],
)
@pytest.mark.parametrize("pack", ["tiny", "audio_samples"])
def test_predicted_bytes_are_those_that_are_counted(
    on_ranks: OnRanks, request: pytest.FixtureRequest, pack: str, placement: Placement, groups: int, shuffle: str
) -> None:
    index, options = request.getfixturevalue(pack).index, parse_shuffle(shuffle)
    expected = predicted(index.length, placement, groups, options, 4)
    assert counted(on_ranks, index, placement, groups, options, 4) == expected
    assert expected[0].ranks > 0


def test_shuffles_within_groups_cost_the_uplink_nothing(many: Any) -> None:
    lengths = many.index.length
    for placement in (regular(2, 2, 1), place(range(8), [0, 1] * 4)):
        epochs = predicted(lengths, placement, 2, ShuffleOptions(), 4)
        assert all(traffic.uplinks == 0 < traffic.nodes for traffic in epochs)
        epochs = predicted(lengths, placement, 1, ShuffleOptions(), 4)
        assert all(traffic.uplinks > 0 for traffic in epochs)


def test_shuffles_within_parts_cost_the_uplink_nothing_until_all_ranks_shuffle(many: Any) -> None:
    epochs = predicted(many.index.length, regular(2, 2, 2), 1, ShuffleOptions(3, 2), 7)
    assert [traffic.uplinks > 0 for traffic in epochs] == [True, False, False, True, False, False, True]
    assert all(traffic.nodes > 0 for traffic in epochs)
    epochs = predicted(many.index.length, regular(2, 2, 2), 1, ShuffleOptions(3, 4), 7)
    assert [traffic.nodes > 0 for traffic in epochs] == [True, False, False, True, False, False, True]
    epochs = predicted(many.index.length, regular(2, 2, 2), 1, ShuffleOptions(3), 7)
    assert [traffic.ranks > 0 for traffic in epochs] == [True, False, False, True, False, False, True]


def test_the_example_of_the_docstring() -> None:
    before, after = np.array([0, 0, 1, 1, 2, 2, 3, 3]), np.array([1, 0, 0, 2, 1, 2, 3, 3])
    placement = regular(1, 2, 2)
    traffic = shuffle_traffic(before, after, np.full(8, 996, np.int32), form_groups(placement, 1), placement)
    assert traffic == ShuffleTraffic(4000, 2000, 0)


@given(st.integers(2, 6), st.integers(0, 50))
def test_a_permutation_moves_the_share_of_the_docstring(ranks: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 300, 4000).astype(np.int32)
    nbytes = int((blocks_of(lengths, block_of(lengths)) * block_of(lengths) + 4).sum())
    traffic = predicted(lengths, one_rank_per_node(ranks), 1, ShuffleOptions(), 2)[1]
    assert traffic.ranks == traffic.nodes == pytest.approx(nbytes * (1 - 1 / ranks), rel=0.1)
    assert traffic.uplinks == 0
