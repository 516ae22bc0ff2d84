"""Rules by their names, and one of a user's own: verified, predicted, drawn and played without MPI."""

from __future__ import annotations

import pytest
import torch
from tests.rules.largest import Largest
from tests.step.sharded import Sharded
from torch import nn

from unisono.errors import UsageError
from unisono.rules import BSP, RULES, Exchange, LocalSGD, find_rule
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.draw import draw, picture_of
from unisono.step.in_process import Batch, InProcessReplica, play_in_process
from unisono.step.layout import even_layout
from unisono.step.predict import predict
from unisono.step.program import Step
from unisono.step.rule import Rule
from unisono.step.verify import verify


def test_rules_have_names() -> None:
    assert [find_rule(name) for name in RULES] == [BSP, LocalSGD]
    with pytest.raises(UsageError, match="there is no rule 'easy'; there are bsp, local_sgd"):
        find_rule("easy")


@pytest.mark.parametrize("rule", [BSP(), LocalSGD(every=3), Largest(), Sharded()])
def test_what_a_rule_is(rule: Rule) -> None:
    assert isinstance(rule, Rule)
    assert hash(rule) == hash(type(rule)(**vars(rule)))


def test_an_average_every_no_steps_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LocalSGD\(every=0\): weights are averaged every 1 or more steps"):
        LocalSGD(every=0)


def test_weights_are_not_rounded_by_a_wire() -> None:
    with pytest.raises(UsageError, match="a wire of bfloat16 would round"):
        LocalSGD(Exchange(wire="bfloat16"))


def test_a_rule_of_ones_own_is_verified_and_predicted_and_drawn() -> None:
    layout = even_layout(4, 3)
    verify(Largest(), layout, [Step(0), Step(1)])
    costs = Costs(layout, Computing((0.0, 1.0, 2.0), (9.0, 7.0, 5.0), 9.0), Cost(0.0, 1.0 / layout.bucket(1).nbytes))
    assert predict(Largest(), costs) == predict(BSP(), costs)
    assert "l largest" in draw(picture_of(Largest(), layout, 1))


def test_sharded_updates_are_predicted_to_move_as_much_as_an_allreduce() -> None:
    layout = even_layout(4, 3)
    costs = Costs(layout, Computing((0.0, 1.0, 2.0), (9.0, 7.0, 5.0), 9.0), Cost(0.0, 1.0 / layout.bucket(1).nbytes))
    assert predict(Sharded(), costs).communicating == predict(BSP(), costs).communicating
    assert "g all_gather" in draw(picture_of(Sharded(), layout, 1))


def test_a_rule_of_ones_own_learns_in_one_process() -> None:
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
