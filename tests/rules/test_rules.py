"""Rules by their names, and one of a user's own: verified, predicted, drawn and played without MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.rules.gossip import Gossip
from tests.rules.largest import Largest
from torch import nn

from unisono.errors import StepError, UsageError
from unisono.placement import Partition
from unisono.rules import BSP, EASGD, RULES, DiLoCo, Exchange, LocalSGD, find_rule
from unisono.rules.asynchronous import has_servers
from unisono.rules.sharded import Sharded
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict
from unisono.step.program import Operation, Role, Step
from unisono.step.rule import BaseRule, Traits
from unisono.step.verify import verify
from unisono.testing import Batch, InProcessReplica, play_in_process
from unisono.view.step import draw, picture_of


def test_rules_are_found_by_name() -> None:
    assert {BSP, Sharded, EASGD, LocalSGD, DiLoCo} <= {find_rule(name) for name in RULES}
    with pytest.raises(UsageError, match=f"there is no rule 'easy'; there are {', '.join(RULES)}"):
        find_rule("easy")


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_table_is_verified(name: str, overlap: str) -> None:
    """As its options are by default, for two of its periods, or 32 steps."""
    rule = find_rule(name)(overlap=overlap)
    if has_servers(rule):
        pytest.skip("tests/rules/test_asynchronous.py verifies those with servers")
    steps, period = [Step(step) for step in range(min(32, 2 * rule.traits.period))], rule.traits.period
    for ranks in range(1, 8):
        verify(rule, layout := even_layout(ranks, 3), steps)
        for step in steps:  # a run gives the number in the period alone
            assert rule(Step(step.number + period), 0, layout) == rule(step, 0, layout)


@pytest.mark.parametrize(
    "rule", [BSP(), BSP(scale="sum"), LocalSGD(every=3), DiLoCo(every=8), EASGD(), Largest(), Gossip(), Sharded()]
)
def test_rules_are_values(rule: BaseRule) -> None:
    assert isinstance(rule.traits, Traits)
    assert rule.traits == rule.traits
    assert hash(rule) == hash(type(rule)(**vars(rule)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BSP("int8"), r"BSP\(exchange='int8'\): pass an Exchange, as in BSP\(Exchange\(wire="),
        (lambda: BSP(overlap="concurrent", outstanding=-1), "BSP: outstanding = -1, but it has to be at least 1"),
        (lambda: Sharded(outstanding=0), "Sharded: outstanding = 0, but it has to be at least 1"),
        (lambda: Exchange(wire="int16"), "there is no wire 'int16'; there are float32, "),
        (lambda: Exchange(bucket_bytes=-1), "Exchange: bucket_bytes = -1, but it has to be at least 1"),
        (lambda: Exchange(bucket_bytes="1 MiB"), "Exchange: bucket_bytes = '1 MiB' is not a whole number"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_an_average_every_0_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="LocalSGD: every = 0, but it has to be at least 1"):
        LocalSGD(every=0)
    with pytest.raises(UsageError, match="LocalSGD: every = 'often' is not a whole number"):
        LocalSGD(every="often")  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert LocalSGD(every=np.int64(4)) == LocalSGD(every=4)
    assert EASGD(alpha=np.float32(0.25), period=np.int32(3)) == EASGD(alpha=0.25, period=3)
    with pytest.raises(UsageError, match=r"LocalSGD: every = 2\.5 is not a whole number"):
        LocalSGD(every=np.float32(2.5))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="alpha = nan"):
        EASGD(alpha=np.float64("nan"))


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(UsageError, match="BSP: scale = 'median'; it is one of mean, sum"):
        BSP(scale="median")


def test_a_wire_of_local_sgd_goes_by_direct() -> None:
    with pytest.raises(UsageError, match=r"the wire 'int8' .* as 'ring' does not: set algorithm to 'direct'"):
        LocalSGD(Exchange("ring", "int8"))
    verify(LocalSGD(Exchange("direct", "int8"), every=2), even_layout(3, 4), [Step(step) for step in range(5)])


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
        batches.append([Batch(features, (features.sum(1) > 0).long()) for features in inputs])
    loss = nn.functional.cross_entropy
    replicas = [
        InProcessReplica(net, torch.optim.SGD(net.parameters(), 0.5), loss, layout, mine)
        for net, mine in zip(nets, batches, strict=True)
    ]
    play_in_process(Largest(), replicas, [Step(step) for step in range(60)])
    assert all(torch.equal(nets[0].weight, net.weight) for net in nets)
    last = batches[0][-1]
    assert loss(nets[0](last.inputs), last.labels) < 0.5 * loss(nn.Linear(40, 2)(last.inputs), last.labels)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_a_rule_that_averages_with_a_neighbour_is_verified(ranks: int) -> None:
    for overlap in OVERLAPS:
        for seed in range(5):
            verify(Gossip(overlap=overlap), even_layout(ranks, 3), [Step(step) for step in range(4)], seed)


LOST = Operation("allreduce", None, role=Role.COLLECTIVE)
"""An allreduce that sums nothing."""


def test_a_mean_over_other_ranks_than_it_was_divided_by_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(Gossip):
        def partitions(self, ranks: int) -> list[Partition]:
            return [((0, 1, 2),)] if ranks == 3 else super().partitions(ranks)

        def allreduce(self) -> Operation:
            return LOST

    with pytest.raises(StepError, match=r"needs a mean over 3 ranks for parameter .* the sum of ranks \[.\], with"):
        verify(Lost(), even_layout(3, 1), [Step(0)])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gossip_is_what_pairs_of_models_averaged_by_hand_are(ranks: int) -> None:
    """Ranks 0 and 1, 2 and 3 in even steps; 1 and 2, 3 and 0 in odd ones. A last one has no neighbour."""
    generator, loss = torch.Generator().manual_seed(0), nn.functional.cross_entropy
    inputs = torch.randn(ranks, 5, 8, 6, generator=generator, dtype=torch.float64)
    batches = [[Batch(features, (features.sum(1) > 0).long()) for features in mine] for mine in inputs]
    nets, expected = ([nn.Linear(6, 2).double() for _ in range(ranks)] for _ in range(2))
    for net, other in zip(nets, expected, strict=True):
        other.load_state_dict(net.state_dict())
    layout = even_layout(ranks, 2)
    optimizers = [torch.optim.SGD(net.parameters(), 0.5) for net in nets]
    replicas = [
        InProcessReplica(*trained, loss, layout, mine) for *trained, mine in zip(nets, optimizers, batches, strict=True)
    ]
    play_in_process(Gossip(), replicas, [Step(step) for step in range(5)], seed=ranks)
    for step in range(5):
        for net, mine in zip(expected, batches, strict=True):
            net.zero_grad()
            loss(net(mine[step].inputs), mine[step].labels).backward()
            torch.optim.SGD(net.parameters(), 0.5).step()
        order = [(step % 2 + n) % ranks for n in range(ranks)]
        for rank, neighbour in zip(order[::2], order[1::2], strict=False):
            for its, theirs in zip(expected[rank].parameters(), expected[neighbour].parameters(), strict=True):
                mean = (its.detach() + theirs.detach()) / 2
                its.data, theirs.data = mean.clone(), mean.clone()
    for net, other in zip(nets, expected, strict=True):
        torch.testing.assert_close(net.weight, other.weight, rtol=0, atol=1e-12)
