"""Changes of a run, its rules or its machine."""

from __future__ import annotations

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import find_machine
from unisono.rules import BSP, Exchange, LocalSGD
from unisono.training.planned_change import changed
from unisono.training.planned_run import planned_run, with_rules

RUN, MACHINE = planned_run(None, "small_convnet", 64), find_machine("taihulight")


def test_each_change_is_of_one_thing() -> None:
    wire, same = changed(RUN, MACHINE, "wire=bfloat16")
    assert (wire.rules, same) == ({"bsp": BSP(Exchange(wire="bfloat16"))}, MACHINE)
    rule, same = changed(RUN, MACHINE, "rule=local_sgd:16")
    assert (rule.rules, same) == ({"local_sgd:16": LocalSGD(every=16)}, MACHINE)
    run, faster = changed(RUN, MACHINE, "bandwidth=2x")
    assert (run, faster.link.bandwidth) == (RUN, 2 * MACHINE.link.bandwidth)


def test_changes_are_made_together() -> None:
    run, machine = changed(RUN, MACHINE, "wire=int8,rule=local_sgd:16,bandwidth=2x,latency=0.5x")
    assert run.rules == {"local_sgd:16": LocalSGD(Exchange(wire="int8"), every=16)}
    assert machine.name.endswith("bandwidth=2x, latency=0.5x")
    assert changed(with_rules(RUN, "bsp,sharded", None), MACHINE, "wire=int8")[0].rules.keys() == {"bsp", "sharded"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("wire=float9", "--what-if wire=float9: there is no wire 'float9'; there are float32, "),
        ("rule=bps", "there is no rule 'bps'"),
        ("nodes=2", "give a factor above 0 for bandwidth, .* or wire=bfloat16 or rule=local_sgd:16"),
        ("bandwidth=2x,", "give a factor above 0"),
    ],
)
def test_other_words_are_refused(words: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        changed(RUN, MACHINE, words)
