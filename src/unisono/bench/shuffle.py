"""Time and memory of a shuffle on these ranks, of samples of random bytes (DIMD's figures 7 to 9); and of messages.

    pack in a folder that all ranks read ─▶ partition of each rank ─ an epoch: owners, shuffle, index ─▶ seconds

Samples are sorted by class, so that the first epoch has all to mix; it is not timed. The slowest rank counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.kinds import RAW
from unisono.data.options import DataOptions
from unisono.data.order import epoch_order, parse_shuffle
from unisono.data.pack.index import read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.data.storage.partitioned import PartitionedStorage
from unisono.world import World

EPOCHS, BATCH, SEED = 5, 256, 0

LENGTH = 1_000
"""Bytes of a sample."""


def random_pack(folder: Path, samples: int) -> Path:
    """Write a pack of so many samples of random bytes, sorted by class, into a folder, and return it."""
    data = np.random.default_rng(0).integers(0, 256, (samples, LENGTH), np.uint8)
    keys, labels = [str(sample) for sample in range(samples)], np.arange(samples) * 10 // samples
    sizes = np.full(samples, LENGTH)
    source = Source(RAW, tuple("0123456789"), keys, labels, sizes, lambda sample: data[sample].tobytes(), (LENGTH, 1))
    pack(source, folder, PackOptions(), 2, lambda: None)
    return folder


def measure_shuffle(world: World, folder: Path, groups: int, rate: float | None) -> list[dict[str, Any]]:
    """Return named samples: seconds of shuffles of a pack in `groups` groups, and what a rank holds and sends.

    `rate` is that of a node's link in bits per second, where it is known. Collective.
    """
    index, options = read_index(folder), parse_shuffle("epoch")
    storage, seconds = PartitionedStorage(index, world, DataOptions(groups=groups)), list[float]()
    for epoch in range(EPOCHS):
        order = epoch_order(len(index), BATCH, SEED, epoch, options)
        world.barrier()
        begun = time.perf_counter()
        storage.epoch(order, BATCH)
        seconds.append(max(world.all_gather_object(time.perf_counter() - begun)))
    held = max(world.all_gather_object(storage.nbytes))
    storage.close()
    members = world.size // groups
    sent = index.nbytes / members * (1 - 1 / members)
    rows = [
        {"name": "a shuffle", "unit": "s", "samples": seconds[1:]},
        {"name": "samples of a rank", "unit": "MB", "samples": [held / 1e6]},
    ]
    if rate:
        shares = [100 * 8 * sent / took / rate for took in seconds[1:]]
        rows.append({"name": "rate of a learner, of its link", "unit": "%", "samples": shares})
    return rows
