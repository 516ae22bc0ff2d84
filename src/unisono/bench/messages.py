"""Messages between two ranks by size, there and back through the MPI library (swCaffe's figure 6).

rank 0   ── message ─▶     ◀─ message ──     16 times for short ones; a sample is half the time there and back
rank 1
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unisono.formats import format_bytes
from unisono.world import World

SAMPLES = 5
"""Samples of each size; the first, before them, does not count."""

MESSAGES, MANY_UP_TO = [4 << power for power in range(0, 20, 2)], 64 << 10
"""Bytes of the messages, 4 bytes to 1 MiB; up to MANY_UP_TO bytes 16 are sent there and back in each sample."""


def measure_messages(world: World) -> list[dict[str, Any]]:
    """Return named samples of messages between ranks 0 and 1 by size: half the time there and back, bytes per second.

    The other ranks wait. Collective.
    """
    found, comm = list[dict[str, Any]](), world.comm
    for size in MESSAGES:
        ball, turns, seconds = np.zeros(size, np.uint8), 16 if size <= MANY_UP_TO else 1, list[float]()
        for _ in range(1 + SAMPLES):
            world.barrier()
            begun = time.perf_counter()
            for sends in 2 * turns * (world.rank == 0, world.rank == 1) if world.rank < 2 else ():
                move = comm.Send if sends else comm.Recv
                move(ball, 1 - world.rank)
            seconds.append((time.perf_counter() - begun) / (4 * turns))
        taken = world.call_on_root(lambda: seconds[1:])  # noqa: B023  called at once
        name = f"message of {format_bytes(size)}"
        found.append({"name": name, "unit": "ms", "samples": [1e3 * each for each in taken]})
        found.append({"name": f"{name}, rate", "unit": "MB/s", "samples": [size / each / 1e6 for each in taken]})
    return found
