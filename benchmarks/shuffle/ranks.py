"""Times the shuffles of a pack on these ranks, for each number of groups and each interval and scope.

Started on the ranks by run.py:  ranks.py OUTPUT PACK
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from traffic import shuffle_traffic

import unisono
from unisono.data.options import DataOptions
from unisono.data.order import epoch_order, parse_shuffle, ranks_of
from unisono.data.pack.index import Index, read_index
from unisono.data.storage.partitioned import PartitionedStorage, owners_in_epoch
from unisono.data.storage.sample_store import nbytes_of
from unisono.world import World

EPOCHS, BATCH, SEED = 5, 256, 0
SHUFFLES = ("epoch", "every:4", "every:4,parts:2")


def main(output: str, pack: str) -> None:
    """Measure numbered by supernode, and numbered by turns: groups by place and by number of rank."""
    world = unisono.init()
    index = read_index(Path(pack))
    half = world.size // 2
    by_turns = world.split(0, key=world.rank % half * 2 + world.rank // half)
    unknown = World(by_turns.comm, replace(by_turns.placement, supernodes=()), world.table, watch=world.watch)
    counts = [groups for groups in (1, 2, 4) if world.size // groups > 1]
    rows = [measured(index, world, world, groups, "epoch", "one supernode after another") for groups in counts]
    rows += [measured(index, world, world, 1, shuffle, "one supernode after another") for shuffle in SHUFFLES[1:]]
    for groups in counts[1:]:
        rows.append(measured(index, by_turns, by_turns, groups, "epoch", "by turns, grouped by place"))
        rows.append(measured(index, unknown, by_turns, groups, "epoch", "by turns, grouped by number"))
    if world.rank == 0:
        Path(output).write_text(json.dumps(rows, indent=1) + "\n")


def measured(index: Index, world: World, placed: World, groups: int, shuffle: str, numbering: str) -> dict[str, object]:
    """Return seconds, memory and predicted bytes of an epoch; the slowest rank counts, `placed` has the supernodes."""
    storage, options = PartitionedStorage(index, world, DataOptions(groups=groups)), parse_shuffle(shuffle)
    owners = ranks_of(len(index), len(index), storage.members)
    seconds, uplinks, sent = list[float](), list[int](), list[int]()
    for epoch in range(EPOCHS):
        order = epoch_order(len(index), BATCH, SEED, epoch, options)
        after = owners_in_epoch(order, BATCH, np.array(storage.groups.member_of_rank))
        traffic = shuffle_traffic(owners, after, index.length, storage.groups, placed.placement)
        owners = after
        world.barrier()
        begun = time.perf_counter()
        storage.epoch(order, BATCH)
        seconds.append(max(world.all_gather_object(time.perf_counter() - begun)))
        uplinks.append(traffic.uplinks)
        sent.append(traffic.ranks)
    store = storage._store
    laid_out = np.diff(store.cuts, axis=0).max(axis=0)
    memory = nbytes_of(store.capacity, store.block) + nbytes_of(laid_out, store.block)
    row = {
        "ranks": world.size,
        "groups": groups,
        "shuffle": shuffle,
        "numbering": numbering,
        "pack_bytes": index.nbytes,
        "seconds": statistics.mean(seconds[1:]),
        "spread": [min(seconds[1:]), max(seconds[1:])],
        "sent_bytes": statistics.mean(sent[1:]),
        "uplink_bytes": statistics.mean(uplinks[1:]),
        "partition_bytes": max(world.all_gather_object(storage.nbytes)),
        "memory_bytes": max(world.all_gather_object(memory)),
    }
    storage.close()
    return row


if __name__ == "__main__":
    main(*sys.argv[1:])
