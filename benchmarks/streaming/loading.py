"""Loads epochs of a pack without training, streamed and from partitions by turns.

Started on the ranks by run.py:  loading.py OUTPUT PACK
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import unisono
from unisono.data.feed import Feed, packed_feed
from unisono.data.options import MEGABYTE, DataOptions
from unisono.data.pack.index import read_index
from unisono.world import World

ROUNDS, BATCH, COMPUTING_SECONDS = 5, 128, 0.03
"""Rounds after one that does not count, samples of a step, and the time in which a step "computes"."""


def forget(pack: Path) -> None:
    """Ask the system to drop the stripes from its page cache."""
    for stripe in pack.rglob("stripe-*.arrow"):
        file = os.open(stripe, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def epoch(feed: Feed, world: World, index: int, computing: float) -> tuple[float, float]:
    """Return the seconds of an epoch, and those of them that its steps waited for batches; the slowest rank's."""
    world.barrier()
    begin, waited = time.perf_counter(), 0.0
    batches = feed.epoch(index, BATCH, 0)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        time.sleep(computing)
    of_ranks = world.all_gather_object((time.perf_counter() - begin, waited))
    return max(of_ranks)


def main(output: str, pack: str) -> None:
    """Load by turns: partitioned, streamed from the page cache, streamed from the disk; alone and beside steps."""
    world, folder = unisono.init(), Path(pack)
    index = read_index(folder / "train")
    buffer = index.nbytes // 8  # the two windows in memory are a quarter of the pack
    streamed = DataOptions(pack=pack, storage="streamed", buffer_megabytes=buffer / MEGABYTE)
    places = {
        "partitioned": DataOptions(pack=pack),
        "streamed": streamed,
        "streamed from disk": streamed,
        "streamed from disk, an eighth cached": replace(
            streamed, buffer_megabytes=buffer // 2 / MEGABYTE, cache_megabytes=index.nbytes // 8 / MEGABYTE
        ),
    }
    feeds = {name: packed_feed(place, world, 0) for name, place in places.items()}
    times_of: dict[str, list[tuple[float, float]]] = {}
    numbers = {name: count() for name in places}  # epochs of each follow one another, as in training
    for _ in range(ROUNDS + 1):
        for computing in (0.0, COMPUTING_SECONDS):
            for name, feed in feeds.items():
                if "disk" in name and world.rank == 0:
                    forget(folder)
                times = epoch(feed, world, next(numbers[name]), computing)
                key = f"{name}, {'steps of 30 ms' if computing else 'loading alone'}"
                times_of.setdefault(key, []).append(times)
    held = {name: max(world.all_gather_object(feed._train.sampler.nbytes)) for name, feed in feeds.items()}
    if world.rank == 0:
        rows = {
            key: {
                "samples_per_second": len(index) / statistics.median(seconds for seconds, _ in times[1:]),
                "slowest_and_fastest": sorted(len(index) / seconds for seconds, _ in times[1:])[:: ROUNDS - 1],
                "waiting_share": statistics.median(waited / seconds for seconds, waited in times[1:]),
            }
            for key, times in times_of.items()
        }
        facts = {"ranks": world.size, "samples": len(index), "bytes": index.nbytes, "buffer_bytes": buffer}
        content = {**facts, "batch": BATCH, "rounds": ROUNDS, "held_at_the_end": held, "loading": rows}
        Path(output).write_text(json.dumps(content, indent=2) + "\n")
        print(json.dumps(content, indent=2))
    for feed in feeds.values():
        feed.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
