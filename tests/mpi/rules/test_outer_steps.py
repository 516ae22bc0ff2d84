"""Local SGD and DiLoCo on real ranks: what they train is what one process plays, on one node and on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import pytest
import torch
from tests.mpi.reducer.shares import batches
from tests.mpi.reducer.test_rules import network, optimizer_of
from tests.reducer.test_bucket_memory import Allocator
from tests.rules.gossip import Gossip
from torch import nn

import unisono
from unisono.errors import UsageError
from unisono.reducer.bucket_memory import BucketMemory
from unisono.rules import BaseRule, DiLoCo, Exchange, LocalSGD
from unisono.schedules.pieces import bounds
from unisono.step.layout import Layout
from unisono.step.program import Operation, Step, Task
from unisono.step.replica import ANCHOR, RESIDUAL, SUM_RESIDUAL, Replica
from unisono.testing import Batch, InProcessReplica, play_in_process
from unisono.training.checkpoint.layout import Checkpoint
from unisono.training.state import load_states, states_of
from unisono.training.trainer import Trainer
from unisono.world import World

EVERY, STEPS, BATCH = 12, 29, 12


def exchange(wire: str | None) -> Exchange:
    """Five buckets, of which the largest layer has four."""
    return Exchange(wire=wire, bucket_bytes=8_000)


class AlignedReplica(InProcessReplica):
    """Replica whose buckets have the gaps and flags of the reducer's, as blocks of numbers share a scale."""

    def __init__(self, memory: BucketMemory, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory = BucketMemory(self.parameters, Allocator())  # type: ignore[arg-type]
        order = list(dict.fromkeys(index for bucket in memory.buckets for index in bucket.parameters))
        self.memory.lay_out(order, 8_000)
        assert self.memory.buckets == memory.buckets

    def read_weights(self, key: int) -> torch.Tensor:
        return self.memory.read_weights(key)

    def write_weights(self, key: int, flat: torch.Tensor) -> None:
        self.memory.write_weights(key, flat)


def trained(world: World, rule: BaseRule, steps: int = STEPS) -> Trainer:
    model = network()
    trainer = Trainer(model, world, rule, optimizer_of(model))
    for inputs, labels in batches(world, steps, BATCH):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    return trainer


def played(world: World, rule: BaseRule, memory: BucketMemory, steps: int = STEPS) -> list[AlignedReplica]:
    """All ranks in this process, on the buckets of a reducer."""
    buckets = [
        bucket._replace(ranges=tuple((part.start, part.stop) for _, _, part in memory.pieces(key)))
        for key, bucket in enumerate(memory.buckets, 1)
    ]
    layout = Layout(world.size, len(memory.parameters), tuple(buckets))
    full_batches = list(batches(alone(world), steps, BATCH))
    replicas = []
    for rank in range(world.size):
        mine = slice(*bounds(BATCH, world.size, rank))
        own: list[Batch | None] = [Batch(inputs[mine].double(), labels[mine]) for inputs, labels in full_batches]
        model = network()
        replicas.append(AlignedReplica(memory, model, optimizer_of(model), nn.functional.cross_entropy, layout, own))
    play_in_process(replace(rule, overlap="chain"), replicas, [Step(step) for step in range(steps)])
    return replicas


def alone(world: World) -> World:
    """A stand-in for a world of one rank, which has whole batches."""
    stand_in = object.__new__(type(world))
    stand_in.rank, stand_in.size = 0, 1
    return stand_in


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 1e-12) -> None:
    for mine, its in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance)


def anchors(trainer: Trainer) -> torch.Tensor:
    anchor = trainer.reducer.rule_state()["kept"][ANCHOR]
    return torch.cat([tensor for _, _, tensor in sorted(anchor, key=lambda entry: entry[:2])])


@dataclass(frozen=True)
class Unrounded(Gossip):
    """Gossip that refuses what would round its weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange.wire is not None:
            raise UsageError(f"gossip with the wire {self.exchange.wire!r} would round weights")


RULES: list[BaseRule] = [
    Gossip(exchange(None)),
    Unrounded(exchange(None)),
    *(LocalSGD(exchange(wire), every=4) for wire in (None, "int4", "float16")),
    *(
        DiLoCo(exchange(wire), every=EVERY, fragments=fragments, delay=delay)
        for wire, fragments, delay in ((None, 1, 0), (None, 4, 2), ("int4", 2, 1), ("int4", 4, 0), ("int8", 1, 2))
    ),
]
"""Each number of fragments, each delay, and each wire; tests/rules/test_diloco.py has all of them with each other."""


def name_of(rule: Any) -> str:
    more = f" of {rule.fragments} with delay {rule.delay}" if isinstance(rule, DiLoCo) else ""
    return f"{type(rule).__name__}{more} by {rule.exchange.wire}"


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_ranks_train_what_one_process_plays(group: World, rule: BaseRule) -> None:
    trainer = trained(group, rule)
    memory = trainer.reducer.memory
    assert len(memory.buckets) > 4
    expected = group.call_on_root(lambda: [weights(replica.model) for replica in played(group, rule, memory)])
    close(weights(trainer.model), expected[group.rank])
    if rule.traits.state.has_anchor:
        mine = anchors(trainer)
        assert all(torch.equal(mine, its) for its in group.all_gather_object(mine))


@pytest.mark.parametrize(
    ("overlap", "wire"),
    [("chain", "int4"), ("concurrent", "int4"), ("funnel", "int8"), ("none", "int4")],
)
def test_one_node_and_several_have_the_same_bits(group: World, spread: World, overlap: str, wire: str) -> None:
    """Parcels are encoded once, and summed in the order of ranks: the transport makes no difference."""
    rule = DiLoCo(exchange(wire), overlap, every=4, fragments=2)
    close(weights(trained(group, rule).model), weights(trained(spread, rule).model), 0.0)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_nothing_is_lost_in_a_wire(spread: World, wire: str) -> None:
    """The anchor's moves and the residuals of all ranks are what inner steps have moved, to 1e-12."""
    rule = LocalSGD(exchange(wire), every=STEPS)
    trainer = trained(spread, rule, STEPS)
    exact = trained(spread, LocalSGD(exchange(None), every=STEPS), STEPS)
    reducer = trainer.reducer
    for key in reducer.memory.keys:
        kept = reducer.programs.rule_memory.kept
        residual = kept[RESIDUAL, key].clone()
        residual[slice(*bounds(len(residual), spread.size, spread.rank))] += kept[SUM_RESIDUAL, key]
        left = torch.stack(spread.all_gather_object(residual)).sum(0)
        applied = kept[ANCHOR, key]  # the change is the anchor's less the weights', hence the sign
        torch.testing.assert_close(applied - left, exact.reducer.memory.read_weights(key), rtol=0, atol=1e-12)
        assert left.abs().max() > 0


@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(exchange("int4"), every=4),
        DiLoCo(exchange("int4"), every=8, fragments=2, delay=2),
        DiLoCo(exchange(None), every=8, fragments=4, delay=1),
        Gossip(exchange(None)),
    ],
    ids=name_of,
)
def test_a_run_resumes_bit_for_bit_wherever_it_stopped(group: World, rule: BaseRule) -> None:
    """In the middle of a period, also with a fragment in flight."""
    uninterrupted = trained(group, rule, 14)
    for stop in (3, 5, 8):
        first = trained(group, rule, stop)
        saved = Checkpoint(stop, *states_of(first, group), {})
        assert len(saved.optimizer["ranks"]) == (group.size if group.rank == 0 else 0)
        saved = group.call_on_root(lambda value=saved: value)  # type: ignore[misc]
        versions = first.model.state_dict()._metadata
        assert saved.weights._metadata == saved.optimizer["ranks"][group.rank]["weights"]._metadata == versions
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # nothing of it is left when it has resumed
        second = Trainer(model, group, rule, optimizer_of(model))
        assert load_states(second, group, saved) == []
        for index, (inputs, labels) in enumerate(batches(group, 14, BATCH)):
            if index >= stop:
                second.step(inputs.double(), labels)
        second.wait()
        close(weights(second.model), weights(uninterrupted.model), 0.0)
        if rule.traits.state.has_anchor:
            assert torch.equal(anchors(second), anchors(uninterrupted))


def test_a_change_in_flight_goes_with_the_next_where_a_run_resumes_in_other_buckets(group: World) -> None:
    small, large = (DiLoCo(Exchange(bucket_bytes=size), every=8, fragments=2, delay=2) for size in (8_000, 16_000))
    states = states_of(trained(group, small, 3), group)
    saved = group.call_on_root(lambda: Checkpoint(3, *states, {}))
    model = network()
    resumed = Trainer(model, group, large, optimizer_of(model))
    assert load_states(resumed, group, saved) == []
    for inputs, labels in batches(group, 16, BATCH):
        resumed.step(inputs.double(), labels)
    resumed.wait()
    mine = anchors(resumed)
    assert all(torch.equal(mine, its) for its in group.all_gather_object(mine))


def test_another_number_of_ranks_begins_with_the_anchor(group: World) -> None:
    rule = DiLoCo(exchange("int4"), every=8, fragments=2, delay=2)
    trainer = trained(group, rule, 6)  # with a fragment in flight
    states = states_of(trainer, group)
    weights_of_all, optimizer = group.call_on_root(lambda: states)
    with trainer.reducer.weights.averaged():
        close([parameter.detach() for parameter in trainer.model.parameters()], list(weights_of_all.values()), 0.0)
    optimizer["ranks"] = [*optimizer["ranks"], optimizer["ranks"][0]]
    model = network()
    other = Trainer(model, group, rule, optimizer_of(model))
    (line,) = load_states(other, group, Checkpoint(6, weights_of_all, optimizer, {}))
    assert f"the run had {group.size + 1} ranks with weights of their own: all begin with the anchor" in line
    close(weights(model), list(weights_of_all.values()), 0.0)
    for inputs, labels in batches(group, 10, BATCH):
        other.step(inputs.double(), labels)
    mine = anchors(other)
    assert all(torch.equal(mine, its) for its in group.all_gather_object(mine))


def test_an_evaluation_uses_the_anchor(group: World) -> None:
    trainer = trained(group, DiLoCo(exchange(None), every=8, fragments=1, delay=0), 10)
    own = weights(trainer.model)
    with trainer.reducer.weights.averaged():
        common = weights(trainer.model)
    close(weights(trainer.model), own, 0.0)
    at_the_end = weights(trained(group, DiLoCo(exchange(None), every=8, fragments=1, delay=0), 8).model)
    close(common, at_the_end, 0.0)
    assert not torch.equal(common[0], own[0])
    fresh = Trainer(network(), group, DiLoCo(exchange(None)), optimizer_of(network()))
    with fresh.reducer.weights.averaged():
        close(weights(fresh.model), weights(network()))


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_rule_in_a_custom_loop(group: World, fragments: int) -> None:
    rule = DiLoCo(exchange("int8"), every=6, fragments=fragments, delay=1)
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, group, rule, optimizer)
    for inputs, labels in batches(group, STEPS, BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    close(weights(model), weights(trained(group, rule).model))


RELEASED = Event()


@dataclass(frozen=True)
class Held(DiLoCo):
    """DiLoCo whose exchanges do not begin before they are released."""

    @property
    def exchange_operation(self) -> Operation:
        operation = super().exchange_operation

        def act(replica: Replica, task: Task, world: Any) -> None:
            assert RELEASED.wait(60)
            assert operation.act is not None
            operation.act(replica, task, world)

        return replace(operation, act=act)


def test_an_exchange_runs_beside_the_next_steps(group: World) -> None:
    """Two steps end while the fragment that the first has packed is under way; the outer step of the third needs it."""
    model = network()
    trainer = Trainer(model, group, Held(exchange("int4"), "chain", every=4, fragments=1, delay=2), optimizer_of(model))
    ended: list[str] = []
    trainer.reducer.observe = lambda span: ended.append(span.name.split()[0])
    RELEASED.clear()
    for index, (inputs, labels) in enumerate(batches(group, 4, BATCH)):
        trainer.step(inputs.double(), labels)
        if index == 2:
            trainer.wait()
            assert "pack_change" in ended
            assert "exchange_change" not in ended
            RELEASED.set()
    trainer.wait()
    buckets = len(trainer.reducer.memory.buckets)
    assert ended.count("exchange_change") == ended.count("outer_step") == buckets


def test_buckets_are_cut_until_each_fragment_has_one(group: World) -> None:
    lines: list[str] = []
    small = Trainer(network(), group, DiLoCo(fragments=4), optimizer_of(network()))
    assert len(small.reducer.memory.buckets) >= 4
    given = Trainer(network(), group, DiLoCo(Exchange(bucket_bytes=1 << 20), fragments=4), optimizer_of(network()))
    given.reducer.programs.log_with(lines.append)
    expected = ["1 of 4 fragments: the weights have 1 buckets; smaller ones give more"] if group.rank == 0 else []
    assert lines == expected


@pytest.mark.parametrize(("wire", "tolerance"), [("int8", 0.02), ("int4", 0.4)])
def test_averaged_gradients_in_a_block_scaled_wire(spread: World, wire: str, tolerance: float) -> None:
    """Flags do not share a block with gradients, which would be rounded to 0 beside them."""
    exact = weights(trained(spread, unisono.BSP(exchange(None), "chain"), 5).model)
    actual = weights(trained(spread, unisono.BSP(exchange(wire), "chain"), 5).model)
    for mine in spread.all_gather_object(actual):
        close(mine, actual, 0.0)
    begin = weights(network())
    for weight, its, old in zip(actual, exact, begin, strict=True):
        assert (weight - its).norm() <= tolerance * (its - old).norm()


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_exact_averages_have_the_bits_of_any_schedule(spread: World, kind: type[LocalSGD]) -> None:
    """On one node and between two, by schedules and by MPI's own sum: only the buckets are the same."""
    averages = []
    for algorithm in ("auto", "ring", "direct", "library"):
        trainer = trained(spread, kind(Exchange(algorithm, "exact", 8_000), every=EVERY))
        weights = [parameter.detach().numpy().tobytes() for parameter in trainer.model.parameters()]
        averages.append(b"".join(weights))
    assert len(set(averages)) == 1
