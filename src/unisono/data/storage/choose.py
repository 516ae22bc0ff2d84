"""Choice of a storage from the memory there is: as many copies of the pack as fit, so that as little as possible moves.

    replicated              a copy in each node's shared memory      an epoch moves nothing
    partitioned, k groups   k copies over all ranks                  an epoch moves samples inside the groups
    partitioned             one copy over all ranks                  an epoch moves samples between all ranks
    streamed                a shuffle buffer over all ranks,         an epoch reads from the stripes what no node
                            and a cache in each node                 has in its cache

The first that fits is taken, with the largest k, at most a copy for each node. 4 ranks on 2 nodes, each with 30 GB
free, of which half is allowed:

    pack of 12 GB           12 GB in each node                                          replicated
    and /dev/shm of 8 GB    2 groups of 2 ranks: 6 GB a rank, 12 GB a node              2 groups
    pack of 20 GB           2 groups: 20 GB a node; 1 group: 5 GB a rank, 10 GB a node  partitioned
    pack of 90 GB           1 group: 22.5 GB a rank, 45 GB a node                       streamed, and with windows of
                            0.5 GB a rank, 14 GB of the pack (16%) cached in each node

A partition also needs spare memory for its shuffle (`partitioned.py`). The batches of an epoch are the same in all that
are in memory; a streamed pack has an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unisono.data.options import MEGABYTE, DataOptions
from unisono.data.pack.index import Index
from unisono.data.storage import AUTO, PARTITIONED, REPLICATED, STREAMED
from unisono.data.storage.free_memory import FreeMemory, node_memory
from unisono.data.storage.handing_over import left_bytes
from unisono.data.storage.partitioned import plan_partition
from unisono.data.storage.streamed_order import blocks_of_pack, memory_limit
from unisono.world import World

MEMORY_SHARE = 0.5
"""Share of a node's free memory that samples may take; the rest is for the model, gradients and batches."""

MIN_CACHED_SHARE = 0.01
"""Least share of a pack that is worth a cache."""


def choose_storage(
    pack: int, partition: Mapping[int, int], nodes: Sequence[FreeMemory], wanted: DataOptions, window: int = 0
) -> tuple[DataOptions, str]:
    """Return the storage with the most copies of a pack that the memory of all nodes takes, and the reason in one line.

    `pack` is the bytes of all samples, `partition[k]` those that a rank needs with k groups; k = 1 is among them. If no
    copy fits, the pack is streamed through the buffer of `wanted`, which takes `window` bytes of a rank, and each node
    caches the bytes that are `wanted`, or for 0 what its memory takes. If the memory of a node is not known, the pack
    is partitioned over all ranks.
    """
    free, shared = [node.free for node in nodes], [node.shared for node in nodes]
    if math.inf in (*free, *shared):
        unknown = "partitioned over all ranks: the free memory of the nodes is not known"
        return replace(wanted, storage=PARTITIONED), unknown
    fits, usage = _compare([pack] * len(nodes), shared)
    if fits:
        return replace(wanted, storage=REPLICATED), f"replicated: a copy takes {usage} (shared memory)"
    because = f"a copy would take {usage} (shared memory)"
    for groups in sorted(partition, reverse=True):
        fits, usage = _compare([node.ranks * partition[groups] for node in nodes], free)
        if fits:
            over = f"in {groups} groups" if groups > 1 else "over all ranks"
            partitioned = replace(wanted, storage=PARTITIONED, groups=groups)
            return partitioned, f"partitioned {over}: partitions take {usage}; {because}"
    cache = wanted.cache or _cache_bytes(pack, nodes, window)
    cached = f", with {min(1, cache / pack):.0%} of the pack cached in each node" if cache else ""
    buffer = f"streamed through a shuffle buffer of {_size(wanted.buffer)}{cached}"
    streamed = replace(wanted, storage=STREAMED, cache_megabytes=cache / MEGABYTE)
    return streamed, f"{buffer}: partitions would take {usage}; {because}"


def resolve_storage(options: DataOptions, index: Index, world: World) -> tuple[DataOptions, str]:
    """Return the options with the storage that "auto" chooses, alike on every rank, and the reason. Collective."""
    if options.storage != AUTO:
        return options, ""
    counts = [groups for groups in range(1, world.nodes + 1) if world.size % groups == 0]
    partition = {groups: plan_partition(index.length, world.size // groups).nbytes for groups in counts}
    window = memory_limit(blocks_of_pack(index), options.buffer, world.size)
    return choose_storage(index.nbytes, partition, node_memory(world, freed=left_bytes()), options, window)


def _cache_bytes(pack: int, nodes: Sequence[FreeMemory], window: int) -> int:
    """Return the bytes of a pack that each node can cache beside the windows of its ranks; 0 if they are too few."""
    most = min(min(MEMORY_SHARE * node.free - node.ranks * window, MEMORY_SHARE * node.shared) for node in nodes)
    return min(int(most), pack) if most >= MIN_CACHED_SHARE * pack else 0


def _compare(needs: Sequence[int], free: Sequence[float]) -> tuple[bool, str]:
    """Return True if each node's need is at most MEMORY_SHARE of its free bytes, and the fullest node in words."""
    fullest = max(range(len(needs)), key=lambda node: needs[node] / max(1, free[node]))
    need, available = needs[fullest], free[fullest]
    usage = f"{_size(need)} of {_size(available)} free in node {fullest}, of which {MEMORY_SHARE:.0%} may be used"
    return need <= MEMORY_SHARE * available, usage


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:,.1f} MB"
