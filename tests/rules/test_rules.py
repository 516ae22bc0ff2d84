"""Rules by their names, and one of a user's own: verified, predicted, drawn and played without MPI."""

from __future__ import annotations

import pytest
import torch
from tests.rules.largest import Largest
from torch import nn

from unisono.errors import UsageError
from unisono.rules import BSP, EASGD, RULES, DiLoCo, Exchange, LocalSGD, find_rule
from unisono.rules.sharded import Sharded
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.in_process import Batch, InProcessReplica, play_in_process
from unisono.step.layout import even_layout
from unisono.step.predict import predict
from unisono.step.program import Step
from unisono.step.rule import BaseRule, Traits
from unisono.step.verify import verify
from unisono.view.step import draw, picture_of


def test_rules_are_found_by_name() -> None:
    assert [find_rule(name) for name in RULES] == [BSP, Sharded, EASGD, LocalSGD, DiLoCo]
    with pytest.raises(UsageError, match="there is no rule 'easy'; there are bsp, sharded, easgd, local_sgd, diloco"):
        find_rule("easy")


@pytest.mark.parametrize(
    "rule", [BSP(), BSP(scale="sum"), LocalSGD(every=3), DiLoCo(every=8), EASGD(), Largest(), Sharded()]
)
def test_rules_are_values(rule: BaseRule) -> None:
    assert isinstance(rule.traits, Traits)
    assert rule.traits == rule.traits
    assert hash(rule) == hash(type(rule)(**vars(rule)))


def test_an_average_every_0_steps_is_refused() -> None:
    for every in (0, "often"):
        with pytest.raises(UsageError, match=rf"LocalSGD\(every={every!r}\): every must be 1 or more steps"):
            LocalSGD(every=every)


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(UsageError, match=r"BSP\(scale='median'\): there are 'mean', 'sum'"):
        BSP(scale="median")


def test_a_wire_of_local_sgd_goes_by_direct() -> None:
    with pytest.raises(UsageError, match=r"the wire 'int8' .* as 'ring' does not: set algorithm to 'direct'"):
        LocalSGD(Exchange("ring", "int8"))
    verify(LocalSGD(Exchange("direct", "int8"), every=2), even_layout(3, 4), [Step(number) for number in range(5)])


def test_a_custom_rule_is_verified_and_predicted_and_drawn() -> None:
    layout = even_layout(4, 3)
    verify(Largest(), layout, [Step(0), Step(1)])
    costs = Costs(layout, Computing((0.0, 1.0, 2.0), (9.0, 7.0, 5.0), 9.0), Cost(0.0, 1.0 / layout.bucket(1).nbytes))
    assert predict(Largest(), costs) == predict(BSP(), costs)
    assert "l largest" in draw(picture_of(Largest(), layout, 1))


def test_sharded_updates_are_predicted_to_send_as_much_as_an_allreduce() -> None:
    layout = even_layout(4, 3)
    costs = Costs(layout, Computing((0.0, 1.0, 2.0), (9.0, 7.0, 5.0), 9.0), Cost(0.0, 1.0 / layout.bucket(1).nbytes))
    assert predict(Sharded(), costs).communicating == predict(BSP(), costs).communicating
    assert "g all_gather" in draw(picture_of(Sharded(), layout, 1))


def test_a_custom_rule_learns_in_one_process() -> None:
    """The largest twentieth of the gradients of 3 ranks, on points that a line parts."""
    generator = torch.Generator().manual_seed(0)
    nets = []
    for _ in range(3):
        torch.manual_seed(0)
        nets.append(nn.Linear(40, 2))
    layout = even_layout(3, 2)
    batches = []
    for _ in nets:
        inputs = torch.randn(60, 16, 40, generator=generator)
        batches.append([Batch(one, (one.sum(1) > 0).long()) for one in inputs])
    loss = nn.functional.cross_entropy
    replicas = [
        InProcessReplica(net, torch.optim.SGD(net.parameters(), 0.5), loss, layout, mine)
        for net, mine in zip(nets, batches, strict=True)
    ]
    play_in_process(Largest(), replicas, [Step(number) for number in range(60)])
    assert all(torch.equal(nets[0].weight, net.weight) for net in nets)
    last = batches[0][-1]
    assert loss(nets[0](last.inputs), last.labels) < 0.5 * loss(nn.Linear(40, 2)(last.inputs), last.labels)
