"""The choice between rules is one of predictions: what updates cost, and what a collective more costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_choose import NETWORK, PARAMETERS, at, loads

from unisono.errors import UsageError
from unisono.plan.choose import BUCKET_SIZES, PredictionInputs, candidates
from unisono.plan.choose_rule import describe, rank_rules
from unisono.rules import BSP, Auto, Sharded
from unisono.step.costs import Cost
from unisono.step.layout import even_layout
from unisono.step.program import Step

SPACE = ("chain", "none"), BUCKET_SIZES[4:], (2,)

SLOW_UPDATES = replace(NETWORK, update=NETWORK.whole / sum(PARAMETERS))
"""Updating all weights takes as long as computing."""


def inputs(slow: bool, cost: Cost, ranks: int = 4, clip: float | None = None) -> PredictionInputs:
    return PredictionInputs(BSP(), SLOW_UPDATES if slow else NETWORK, loads, cost, True, ranks, clip)


def chosen(found: PredictionInputs) -> type:
    return type(rank_rules(Auto().alternatives, found, *SPACE)[0].rule)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_slow_updates_are_sharded(clip: float | None) -> None:
    assert chosen(inputs(True, at(0.3), clip=clip)) is Sharded
    assert chosen(inputs(False, at(0.3), clip=clip)) is BSP


def test_a_latency_that_outlasts_the_update_is_not_worth_it() -> None:
    assert chosen(inputs(True, at(0.3, latency=0.5))) is BSP


def test_each_rule_has_its_own_best_setting_and_the_line_says_both() -> None:
    found = inputs(True, at(0.5))
    ranked = rank_rules((BSP(), Sharded()), found, *SPACE)
    for one in ranked:
        latency = found.cost.latency * (3 if one.rule.sharded else 1)
        own = found._replace(rule=one.rule, cost=found.cost._replace(latency=latency))
        assert one.best == candidates(own, *SPACE)[0]
    steps = [one.best.prediction.step for one in ranked]
    assert steps == sorted(steps)
    words = f"Sharded {steps[0] * 1e3:.1f} ms, BSP {steps[1] * 1e3:.1f} ms"
    assert describe(ranked) == f"rule Sharded: a step is predicted to take {words}"


def test_equal_predictions_take_the_first() -> None:
    ranked = rank_rules((Sharded(), BSP()), inputs(False, Cost(0.0, 0.0)), *SPACE)
    assert [type(one.rule) for one in ranked] == [Sharded, BSP]


def test_until_then_it_is_bsp() -> None:
    layout = even_layout(4, 3)
    assert Auto(overlap="chain")(Step(0), 0, layout) == BSP(overlap="chain")(Step(0), 0, layout)
    assert Auto(overlap="chain").alternatives == (BSP(overlap="chain"), Sharded(overlap="chain"))
    with pytest.raises(UsageError, match="there is no overlap 'odd'"):
        Auto(overlap="odd")(Step(0), 0, layout)
