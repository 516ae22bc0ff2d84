import pytest

from unisono.plan.bottleneck import StepShares, bottleneck
from unisono.plan.loading import Loading
from unisono.step.costs import Cost

FREE = Cost(0.0, 0.0)


@pytest.mark.parametrize(
    ("shares", "memory", "words"),
    [
        (StepShares(9.0, 1.0, 0.0, 3.0, Cost(0, 1)), 2.0, "computing: 90% of the step; 2e+03 ms of communication hide"),
        (StepShares(1.0, 0.0, 0.0, 0.0, FREE), 2.0, "computing: 100% of the step"),
        (StepShares(1.0, 3.0, 0.0, 4.0, Cost(0.5, 1.5)), 2.0, "communication, by bandwidth: 75% of the step"),
        (StepShares(1.0, 3.0, 0.0, 4.0, Cost(3, 0.5)), 2.0, "communication, by latency: 75% of the step"),
        (StepShares(1.0, 0.0, 3.0, 0.0, FREE), 2.0, "updates: 75% of the step"),
        (StepShares(1.0, 0.0, 3.0, 0.0, FREE), 2e10, "memory: a rank needs 20 GB of 10 GB"),
        (
            StepShares(1.0, 0.0, 0.0, 0.0, FREE, Loading(0.1, 3.0)),
            2.0,
            "starved: decoding takes 3e+03 ms, a step without it 1e+03 ms: more cores",
        ),
        (StepShares(1.0, 0.0, 0.0, 0.0, FREE, Loading(3.0, 0.1)), 2.0, "starved: reading takes 3e+03 ms"),
        (StepShares(1.0, 0.0, 0.0, 0.0, FREE, Loading(0.0, 2.0, 2.0)), 2.0, "decoding: 67% of the step, on the cores"),
        (StepShares(1.0, 0.0, 0.0, 0.0, FREE, Loading(0.0, 0.5, 0.5)), 2.0, "computing: 67% of the step"),
        (StepShares(1.0, 3.0, 0.0, 3.0, Cost(0, 1), Loading(0.0, 2.0, 2.0)), 2.0, "communication, by bandwidth"),
    ],
)
def test_the_bottleneck(shares: StepShares, memory: float, words: str) -> None:
    assert bottleneck(shares, 2.0, memory, 1e10).startswith(words)
