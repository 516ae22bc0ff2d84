from dataclasses import replace

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import MachineFacts
from unisono.plan.planned_run import PlannedRun
from unisono.plan.rank_memory import RankMemory, numbers_kept, rank_memory
from unisono.plan.trace import TracedLayer
from unisono.rules import BSP, Exchange, LocalSGD, Sharded

LAYERS = [
    TracedLayer("0", "Linear", parameter_bytes=100, activation_bytes=60),
    TracedLayer("1", "ReLU", activation_bytes=40),
]
RUN = PlannedRun(MachineFacts("example"), LAYERS, 2, BSP(), 32, 4, kept=2.0)


def test_the_worked_example() -> None:
    found = rank_memory(RUN)
    assert found == RankMemory(100, 100, 200, 0, 400)
    assert found.total == 800
    assert rank_memory(replace(RUN, rule=Sharded())).total == 650


def test_an_anchor_is_as_large_as_the_weights() -> None:
    assert rank_memory(replace(RUN, rule=LocalSGD(Exchange(wire="int4")))).anchor == 100
    assert rank_memory(replace(RUN, rule=LocalSGD())).anchor == 0


def test_an_optimizer_keeps_what_its_step_leaves() -> None:
    kept = {name: numbers_kept(name, 0.9) for name in ("sgd", "adamw", "lars", "lamb")}
    assert kept == {"sgd": 1, "adamw": 2, "lars": 1, "lamb": 2}
    assert numbers_kept("sgd", 0.0) == 0
    with pytest.raises(UsageError, match="there is no optimizer 'adagrad'"):
        numbers_kept("adagrad", 0.9)
