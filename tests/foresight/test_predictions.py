"""Predictions to be sealed: those of the plan and those of a search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.foresight.entries import RUN
from tests.plan.test_choose import NETWORK, ask, at, loads
from tests.plan.test_run_plan import MACHINE, network
from tests.plan.test_run_plan import RUN as PLANNED

from unisono.plan.choose import Candidate, PredictionInputs, Setting, candidates, predicted
from unisono.plan.collective_costs import exchange_cost
from unisono.plan.run_plan import plan_run
from unisono.plan.trials import LARGEST_ERROR, NOMINAL_SHARE, WIDER_SHARE, TrialChoice
from unisono.processor import ProcessorUse
from unisono.rules import BSP, BaseRule, Exchange, LocalSGD, Sharded
from unisono.training.foresight import planned_prediction, program_of, tuned_prediction

MIB = 1 << 20


@pytest.mark.parametrize("rule", [BSP(), Sharded(), LocalSGD(every=4), BSP(Exchange(wire="bfloat16"))])
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_planned_prediction_is_the_plan(rule: BaseRule, nodes: int) -> None:
    run = replace(PLANNED, rule=rule, nodes=nodes, ranks_per_node=2)
    (plan,) = plan_run(run, (nodes,))
    prediction = planned_prediction(run, RUN)
    assert prediction.sealed == "before the first step"
    assert prediction.step == pytest.approx(plan.step)
    parts = prediction.parts
    assert (parts.computing, parts.communication, parts.update) == (plan.computing, plan.communication, plan.update)
    assert (prediction.low, prediction.high, prediction.communicating) == (plan.low, plan.high, plan.communicating)
    program = prediction.program
    assert (program.overlap, program.bucket_bytes, program.schedule) == (plan.overlap, plan.bucket_bytes, plan.schedule)
    assert (program.period, program.wire) == (rule.traits.period, rule.exchange.wire or "")
    assert program.nbytes == pytest.approx(sum(layer.parameter_bytes for layer in network()), rel=1e-3), "padding"
    assert (prediction.costs.per_byte > 0) == (nodes > 1)
    if rule == BSP():
        assert (prediction.costs.latency, prediction.costs.per_byte) == exchange_cost(MACHINE, nodes, 2).cost
    assert prediction.updating > 0
    assert prediction.run == RUN


def inputs(update: float = 0.0) -> PredictionInputs:
    return ask(replace(NETWORK, update=update), loads, at(0.5))


@cache
def searched(update: float = 0.0) -> Candidate:
    """Return what a search of a second finds."""
    return candidates(inputs(update))[0]


@pytest.mark.parametrize("update", [0.0, 1e-9])
def test_a_searched_prediction_has_the_parts_of_its_own_step(update: float) -> None:
    chosen = searched(update)
    prediction = tuned_prediction(TrialChoice(chosen), RUN, 24)
    assert prediction.sealed == "after 24 tuning steps"
    assert prediction.step == pytest.approx(chosen.prediction.step)
    assert prediction.parts.computing == NETWORK.whole
    assert (prediction.parts.update > 1e-9) == (update > 0)
    assert prediction.high == pytest.approx(prediction.step * (1 + LARGEST_ERROR))
    assert NETWORK.whole + prediction.parts.update <= prediction.low < prediction.step
    assert prediction.share == NOMINAL_SHARE
    total = sum(bucket.nbytes for bucket in loads(chosen.setting.bucket_bytes, chosen.setting.end_ratio))
    assert prediction.updating == pytest.approx(total * update)


def test_a_prediction_of_shared_cores_says_so_and_is_less_certain() -> None:
    use = ProcessorUse(others=0.5)
    choice = TrialChoice(searched(), "others", use, [0.9, 1.0, 1.3])
    shared, alone = tuned_prediction(choice, RUN, 24), tuned_prediction(choice._replace(doubt=""), RUN, 24)
    assert (shared.doubt, shared.processor, shared.share) == ("others", use, WIDER_SHARE)
    assert (alone.doubt, alone.share) == ("", NOMINAL_SHARE)
    assert shared.low < alone.low < alone.high < shared.high
    assert shared.step == alone.step


def test_programs_are_told_apart_by_their_digests() -> None:
    best = searched()
    facts, _ = program_of(best)
    assert program_of(best)[0] == facts
    assert facts.buckets == len(loads(best.setting.bucket_bytes, best.setting.end_ratio))
    costs = inputs().costs
    clipped = replace(costs, layout=replace(costs.layout, clip=1.0))
    others = [
        predicted(inputs(), Setting("chain", 4 * MIB)),
        predicted(inputs(), Setting("none", 4 * MIB)),
        predicted(inputs()._replace(rule=LocalSGD(every=2)), Setting("none", 4 * MIB)),
        predicted(inputs()._replace(costs=clipped), Setting("none", 4 * MIB)),
    ]
    assert len({facts.digest, *(program_of(variant)[0].digest for variant in others)}) == 5


def test_a_sharded_step_updates_a_share() -> None:
    full, share = (
        program_of(predicted(inputs(1e-9)._replace(rule=rule), Setting("chain", 8 * MIB)))[1]
        for rule in (BSP(), Sharded())
    )
    assert 0 < share < full
