from __future__ import annotations

import torch

from unisono.training.scoring.throughput import BATCH_SIZES, MAX_PASSES, MIN_PASSES, measure_throughput


class Passes:
    """Forward passes that take `seconds` of their own clock each, the first of a size ten times as long."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.sizes = seconds, 0.0, list[int]()

    def forward(self, inputs: torch.Tensor) -> None:
        first = len(inputs) not in self.sizes
        self.now += 10.0 if first else self.seconds[self.sizes.count(len(inputs)) % len(self.seconds)]
        self.sizes.append(len(inputs))

    def measure(self, *sizes: int) -> list[tuple[int, float, float, int]]:
        return list(measure_throughput(self.forward, lambda samples: torch.zeros(samples, 1), sizes, lambda: self.now))


def test_the_median_counts_and_the_first_pass_does_not() -> None:
    passes = Passes(2.0, 1.0, 4.0)
    assert passes.measure(1, 8) == [(1, 2.0, 0.5, MIN_PASSES), (8, 2.0, 4.0, MIN_PASSES)]
    assert passes.sizes == [1] * (1 + MIN_PASSES) + [8] * (1 + MIN_PASSES)


def test_short_passes_are_repeated_until_their_time_or_number_is_enough() -> None:
    assert [entry[3] for entry in Passes(0.125).measure(1)] == [4]
    assert [entry[3] for entry in Passes(1e-6).measure(1)] == [MAX_PASSES]


def test_batch_sizes_double_from_1_to_256() -> None:
    assert tuple(2**power for power in range(9)) == BATCH_SIZES
