"""Throughput of forward passes alone, at batch sizes 1, 2, 4, ... 256 (PCL-DNN, figure 3: scoring).

    batch     forward on zeros: untimed ─ timed ─ timed ─ ...       median of the timed ones
    1         ▏3 ms, ▏1 ms, ▏1 ms, ... until TIMED_SECONDS          1 ms: 1,000 samples/s
    256       ▏190 ms, ▏180 ms, ▏170 ms, ▏180 ms                    180 ms: 1,422 samples/s

A small batch has too few products to fill the cores; a large one has more activations than their caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

TIMED_SECONDS = 0.5
"""Seconds after which no further pass of a batch size is timed."""

MIN_PASSES, MAX_PASSES = 3, 100
"""Fewest and most passes that are timed of a batch size."""


class BatchThroughput(NamedTuple):
    """Throughput at one batch size."""

    batch: int
    seconds: float
    """Median time of a forward pass."""
    samples_per_second: float
    passes: int
    """Timed passes."""


def measure_throughput(
    forward: Callable[[Tensor], object],
    blank: Callable[[int], Tensor],
    sizes: Sequence[int] = BATCH_SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[BatchThroughput]:
    """Yield the throughput of `forward` at each batch size; `blank` returns the inputs of so many samples.

    The first pass of a size is not timed: it allocates memory and creates the library's plans.
    """
    for batch in sizes:
        inputs, seconds = blank(batch), list[float]()
        forward(inputs)
        while len(seconds) < MIN_PASSES or (sum(seconds) < TIMED_SECONDS and len(seconds) < MAX_PASSES):
            begun = clock()
            forward(inputs)
            seconds.append(clock() - begun)
        median = statistics.median(seconds)
        yield BatchThroughput(batch, median, batch / median, len(seconds))
