from dataclasses import replace

import pytest
from tests.plan.test_run_report import FOUR

from unisono.plan.bottleneck import bottleneck, slow_link
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_row import RunPlan


def row(computing: float, communication: float, update: float, communicating: float) -> RunPlan:
    parts = {"computing": computing, "communication": communication, "update": update}
    return replace(FOUR, **parts, communicating=communicating, memory=RankMemory(2.0, 0.0, 0.0, 0.0, 0.0))


COMPUTING, COMMUNICATION, UPDATE = row(1.0, 0.0, 0.0, 0.0), row(1.0, 3.0, 0.0, 4.0), row(1.0, 0.0, 3.0, 0.0)


@pytest.mark.parametrize(
    ("row", "links", "words"),
    [
        (row(9.0, 1.0, 0.0, 3.0), 2.0, "computing: 90% of the step; 2e+03 ms of communication hide"),
        (COMPUTING, 0.0, "computing: 100% of the step"),
        (COMMUNICATION, 3.0, "communication, by bandwidth: 75% of the step"),
        (COMMUNICATION, 1.0, "communication, by latency: 75% of the step"),
        (UPDATE, 0.0, "updates: 75% of the step"),
        (replace(UPDATE, memory=RankMemory(2e10, 0, 0, 0, 0)), 0.0, "memory: a rank needs 20 GB of 10 GB"),
        (
            replace(COMPUTING, loading=2.0, reading=0.1, decoding=3.0),
            0.0,
            "starved: decoding takes 3e+03 ms, a step without it 1e+03 ms: more cores",
        ),
        (replace(COMPUTING, loading=2.0, reading=3.0, decoding=0.1), 0.0, "starved: reading takes 3e+03 ms"),
        (replace(COMPUTING, loading=2.0, decoding=2.0), 0.0, "decoding: 67% of the step, on the cores"),
        (replace(COMPUTING, loading=0.5, decoding=0.5), 0.0, "computing: 67% of the step"),
        (replace(COMMUNICATION, decoding=2.0), 3.0, "communication, by bandwidth"),
    ],
)
def test_the_bottleneck(row: RunPlan, links: float, words: str) -> None:
    assert bottleneck(row, links, 1e10).startswith(words)


def test_the_slowest_link_is_named_where_it_costs_something() -> None:
    assert slow_link({3: 4.0, 5: 6.0}, 1.0, 0.9).startswith("node 5's link (the slowest of 2), 6 times slower: 100 ms")
    assert slow_link({3: 4.0}, 1.0, 0.999) == ""
