"""Times the shuffle beside a bare MPI_Alltoallv of the same bytes, and measures the memory it takes.

`shuffle` moves the samples to holders that are known; `epoch` also finds out who they are and where
everything lies then. Memory: the store counts whole, touched or not, less the samples on it.

Started on the ranks by run.py:  shuffling.py OUTPUT PACK SEGMENT_BYTES [RATE_BITS]
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import unisono
from unisono.data.options import DataOptions
from unisono.data.order import permutation
from unisono.data.pack.index import read_index
from unisono.data.storage.partitioned import PartitionedStorage, owners_in_epoch, shuffle
from unisono.data.storage.sample_store import nbytes_of
from unisono.mpi import MPI

ROUNDS, BATCH = 9, 256
STATUS = Path("/proc/self/status")


def main(output: str, pack: str, segment: str, rate: str = "0") -> None:
    """By turns: a shuffle to a new epoch's holders, and an exchange of as many bytes by the library alone."""
    world = unisono.init()
    index = read_index(Path(pack))
    memory = PartitionedStorage(index, world, DataOptions(), segment_bytes=int(segment))
    ours, full, bare = list[float](), list[float](), list[float]()
    sent = 0
    for epoch in range(0, 2 * ROUNDS + 2, 2):
        owners = owners_in_epoch(permutation(len(index), 0, epoch), BATCH, np.arange(world.size))
        lengths = index.length[memory.numbers]
        counts = np.bincount(owners[memory.numbers], lengths, minlength=world.size).astype(np.int64)
        sent = max(world.all_gather_object(int(counts.sum() - counts[world.rank])))
        world.barrier()
        begun = time.perf_counter()
        shuffle(memory._store, owners)
        ours.append(max(world.all_gather_object(time.perf_counter() - begun)))
        bare.append(max(world.all_gather_object(alltoallv(world.comm, counts))))
        order = permutation(len(index), 0, epoch + 1)
        world.barrier()
        begun = time.perf_counter()
        memory.epoch(order, BATCH)
        full.append(max(world.all_gather_object(time.perf_counter() - begun)))
    store = memory._store
    owners = owners_in_epoch(permutation(len(index), 0, 2 * ROUNDS + 2), BATCH, np.arange(world.size))
    base = _private()
    with private_peak() as most:
        shuffle(memory._store, owners)
    extra = max(0, most[0] - base) + nbytes_of(store.capacity, store.block) - store.nbytes
    results = {
        "ranks": world.size,
        "samples": len(index),
        "bytes": index.nbytes,
        "segments": len(store.cuts) - 1,
        "sent_by_a_rank": sent,
        "shuffle_s": statistics.median(ours[1:]),
        "epoch_s": statistics.median(full[1:]),
        "alltoallv_s": statistics.median(bare[1:]),
        "link_s": sent * 8 / float(rate) if float(rate) else None,
        "spread_s": {"shuffle": [min(ours[1:]), max(ours[1:])], "alltoallv": [min(bare[1:]), max(bare[1:])]},
        "partition_bytes": max(world.all_gather_object(store.nbytes)),
        "peak_above_partition_bytes": max(world.all_gather_object(extra)),
    }
    if world.rank == 0:
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
    memory.close()


def alltoallv(comm: MPI.Intracomm, counts: np.ndarray) -> float:  # type: ignore[type-arg]
    """Seconds of the library's exchange of so many bytes with each rank."""
    received_counts = np.empty_like(counts)
    comm.Alltoall(counts, received_counts)
    send, receive = np.ones(int(counts.sum()), np.uint8), np.ones(int(received_counts.sum()), np.uint8)
    starts = [np.concatenate([[0], each.cumsum()[:-1]]) for each in (counts, received_counts)]
    comm.Barrier()
    begun = time.perf_counter()
    comm.Alltoallv([send, counts, starts[0], MPI.BYTE], [receive, received_counts, starts[1], MPI.BYTE])
    return time.perf_counter() - begun


@contextmanager
def private_peak() -> Iterator[list[int]]:
    """The most private memory of this process within the block, polled every half millisecond."""
    most, over = [_private()], threading.Event()

    def poll() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], _private())

    thread = threading.Thread(target=poll)
    thread.start()
    yield most
    over.set()
    thread.join()


def _private() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
