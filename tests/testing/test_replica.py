"""Rules played on real tensors in one process: parallel equals serial, in whatever order tasks come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.placement import place
from unisono.rules import BSP, Exchange, LocalSGD
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket, Layout, Updates, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import Step
from unisono.step.rule import BaseRule
from unisono.testing import Batch, InProcessReplica, play_in_process

FEATURES, CLASSES = 5, 3


class Net(nn.Module):
    """Two layers that are used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def model() -> Net:
    torch.manual_seed(3)
    return Net().double()


def layout_of(ranks: int, **changes: object) -> Layout:
    """All parameters in three buckets; the largest is cut in two."""
    buckets = (
        Bucket(1, (4, 3, 2)),
        Bucket(1, (0,), ((0, 7),)),
        Bucket(1, (0, 1), ((7, 20), (0, 4))),
    )
    renumbered = tuple(Bucket(b.nbytes, tuple(ORDER[n] for n in b.parameters), b.ranges) for b in buckets)
    return replace(Layout(ranks, 5, renumbered), **changes)  # type: ignore[arg-type]


NAMES = [name for name, _ in Net().named_parameters()]
ORDER = [NAMES.index(name) for name in ("first.weight", "first.bias", "second.weight", "second.bias", "unused")]


def batches_of(ranks: int, steps: int, samples: Sequence[int]) -> list[list[Batch | None]]:
    """For each rank its batches; `samples` says how many samples each has, over and over; 0 is none."""
    generator = torch.Generator().manual_seed(1)
    batches: list[list[Batch | None]] = []
    for rank in range(ranks):
        mine: list[Batch | None] = []
        for step in range(steps):
            count = samples[(rank * steps + step) % len(samples)]
            inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
            labels = torch.randint(0, CLASSES, (count,), generator=generator)
            mine.append(Batch(inputs, labels) if count else None)
        batches.append(mine)
    return batches


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.3, momentum=0.9, weight_decay=0.01)


def train(
    rule: BaseRule,
    layout: Layout,
    batches: list[list[Batch | None]],
    events: Sequence[Step],
    seed: int = 0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
) -> list[Net]:
    nets = [model() for _ in range(layout.ranks)]
    loss = nn.functional.cross_entropy
    replicas = [
        InProcessReplica(net, optimizer(net), loss, layout, mine) for net, mine in zip(nets, batches, strict=True)
    ]
    play_in_process(rule, replicas, events, seed)
    return nets


def serially(batches: list[list[Batch | None]], events: Sequence[Step], clip: float | None = None) -> Net:
    """Train one model on all samples of all ranks, those of steps that do not synchronize with the next that does.

    A sum of gradients over micro-batches is what ranks with several of them have; each is a mean of its samples.
    """
    net = model()
    optimizer = optimizer_of(net)
    waiting: list[Step] = []
    for event in events:
        waiting.append(event)
        if not event.synchronize:
            continue
        optimizer.zero_grad()
        weights = [sum(len(own_batch.labels) for e in waiting if (own_batch := mine[e.number])) for mine in batches]
        for mine, weight in zip(batches, weights, strict=True):
            for step in waiting:
                if (batch := mine[step.number]) is not None:
                    loss = nn.functional.cross_entropy(net(batch.inputs), batch.labels)
                    (loss * weight / sum(weights)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        waiting = []
    return net


def close(net: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=tolerance, msg=name)


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    st.sampled_from(sorted(OVERLAPS)),
    st.sampled_from(Updates),
    st.sampled_from([None, 0.05]),
    st.sampled_from([[4], [5, 2, 3], [4, 0, 2, 3, 1]]),
    st.lists(st.booleans(), max_size=3),
    st.integers(0, 1 << 20),
    st.integers(1, 3),
)
def test_bsp_is_one_model_that_sees_all_samples(
    ranks: int,
    overlap: str,
    updates: Updates,
    clip: float | None,
    samples: list[int],
    synchronize: list[bool],
    seed: int,
    nodes: int,
) -> None:
    """Uneven and empty batches, accumulation, clipping, a parameter without a gradient; all ranks the same bits."""
    events = [Step(step, synchronized) for step, synchronized in enumerate([*synchronize, True])]
    batches = batches_of(ranks, len(events), samples)
    if not any(batch for mine in batches for batch in mine):
        return
    inside = updates is not Updates.OUTSIDE
    layout = layout_of(ranks, updates=updates, clip=clip if inside else None, deferred=inside)
    layout = replace(layout, nodes=place([rank % nodes for rank in range(ranks)]).nodes)
    nets = train(BSP(overlap=overlap), layout, batches, events, seed)
    for net in nets[1:]:
        close(net, nets[0], 0.0)
    close(nets[0], serially(batches, events, clip if inside else None))


@pytest.mark.parametrize("wire", [None, "exact", "bfloat16"])
def test_phases_are_one_sum_on_uneven_nodes(wire: str | None) -> None:
    """Integers are summed exactly in any order; a wire rounds between the nodes alone."""
    events = [Step(0), Step(1)]
    batches, layout = batches_of(4, 2, [4]), layout_of(4, nodes=((0,), (1, 2, 3)))
    phases, chain = (train(BSP(Exchange(wire=wire), name), layout, batches, events) for name in ("phases", "chain"))
    for net in phases:
        close(net, phases[0], 0.0)
        close(net, chain[0], {None: 1e-12, "exact": 0.0, "bfloat16": 1e-2}[wire])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("updates", Updates)
def test_averaging_weights_in_each_step_is_averaging_gradients(ranks: int, updates: Updates) -> None:
    """Theano-MPI: AWAGD at the same rate. With momentum the mean of updated weights is the update of the mean."""
    events = [Step(step) for step in range(4)]
    batches = batches_of(ranks, len(events), [4])
    layout = layout_of(ranks, updates=updates, deferred=updates is not Updates.OUTSIDE)
    nets, gradients = (train(rule, layout, batches, events) for rule in (LocalSGD(every=1), BSP()))
    for net in nets:
        close(net, nets[0], 0.0)
        close(net, gradients[0])


def sgd(rate: float, momentum: float = 0.9, decay: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.SGD(net.parameters(), rate, momentum, weight_decay=decay)


@settings(max_examples=10)
@given(st.integers(1, 4), st.sampled_from([[4], [5, 2, 3], [4, 0, 2, 3, 1]]), st.integers(0, 1 << 20))
def test_a_sum_adds_each_ranks_mean_gradient(ranks: int, samples: list[int], seed: int) -> None:
    """A rank without a batch adds nothing; shares of a batch count alike, however long they are."""
    batches = batches_of(ranks, 2, samples)
    events = [Step(0), Step(1)]
    nets = train(BSP(scale="sum"), layout_of(ranks), batches, events, seed)
    alone = model()
    optimizer = optimizer_of(alone)
    for event in events:
        optimizer.zero_grad()
        for mine in batches:
            if (batch := mine[event.number]) is not None:
                nn.functional.cross_entropy(alone(batch.inputs), batch.labels).backward()
        optimizer.step()
    for net in nets:
        close(net, alone)


@pytest.mark.parametrize(("ranks", "momentum"), [(2, 0.0), (4, 0.9)])
def test_averaged_weights_at_k_times_the_rate_are_summed_gradients(ranks: int, momentum: float) -> None:
    """Theano-MPI section 4: AWAGD at the rate k r is SUBGD at r. Each worker keeps the momentum of its own gradients;
    their sum is the momentum of the sum."""
    events = [Step(step) for step in range(4)]
    batches, layout = batches_of(ranks, len(events), [4]), layout_of(ranks)
    averaged = train(LocalSGD(every=1), layout, batches, events, optimizer=sgd(0.1 * ranks, momentum))
    summed = train(BSP(scale="sum"), layout, batches, events, optimizer=sgd(0.1, momentum))
    close(averaged[0], summed[0])


def test_averaged_weights_and_summed_gradients_differ_in_weight_decay_and_clipping() -> None:
    """At k times the rate the weights decay k times as fast; and each worker clips its own gradient, not the sum."""
    events = [Step(step) for step in range(4)]
    batches, layout = batches_of(2, len(events), [4]), layout_of(2)

    def distance(decay: float, summed_decay: float, clip: float | None = None) -> float:
        limited = replace(layout, clip=clip)
        averaged = train(LocalSGD(every=1), limited, batches, events, optimizer=sgd(0.2, decay=decay))[0]
        summed = train(BSP(scale="sum"), limited, batches, events, optimizer=sgd(0.1, decay=summed_decay))[0]
        return float((averaged.first.weight - summed.first.weight).detach().abs().max())

    assert distance(0.01, 0.01) > 1e-4
    assert distance(0.01, 0.02) < 1e-12  # twice the decay makes them equal again
    assert distance(0.0, 0.0, clip=0.05) > 1e-4


def test_ranks_are_equal_after_an_average_and_differ_between() -> None:
    batches = batches_of(3, 6, [4])
    events = [Step(step) for step in range(6)]
    rule = LocalSGD(every=3)
    net, other, _ = train(rule, layout_of(3), batches, events)
    close(net, other, 0.0)
    net, other, _ = train(rule, layout_of(3), batches, events[:5])
    assert not torch.equal(net.first.weight, other.first.weight)


def test_clipping_of_local_gradients() -> None:
    batches = batches_of(1, 4, [4])
    events = [Step(step) for step in range(4)]
    (net,) = train(LocalSGD(every=2), layout_of(1, clip=0.05), batches, events)
    close(net, serially(batches, events, 0.05))


def test_playing_by_the_clock_takes_the_predicted_time_with_the_same_result() -> None:
    """A slow link: what is trained is the same, and when each task would have ended is told."""
    batches = batches_of(2, 3, [4])
    events = [Step(step) for step in range(3)]
    layout = layout_of(2)
    costs = Costs(layout, Computing((0.0,) * 5, (2.0,) * 5, 2.0), Cost(0.0, 10.0))
    nets = [model(), model()]
    replicas = [
        InProcessReplica(net, optimizer_of(net), nn.functional.cross_entropy, layout, mine)
        for net, mine in zip(nets, batches, strict=True)
    ]
    spans = play_in_process(BSP(), replicas, events, costs=costs)
    assert max(span.end for span in spans) == 3 * (2 + 3 * 10)
    close(nets[0], train(BSP(), layout, batches, events)[0], 0.0)


def test_buffers_are_rank_0s() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    layout = replace(even_layout(2, 6), buffers=True)
    replicas = [
        InProcessReplica(net, optimizer_of(net), nn.functional.cross_entropy, layout, mine)
        for net, mine in zip(nets, batches_of(2, 3, [4]), strict=True)
    ]
    play_in_process(BSP(), replicas, [Step(0), Step(1), Step(2)], seed=4)
    for replica in replicas:
        replica.take_buffers()
    close(nets[0], nets[1], 0.0)


def test_an_error_of_a_member_is_raised() -> None:
    batches = batches_of(2, 1, [4])
    layout = layout_of(2)
    nets = [model(), model()]
    replicas = [
        InProcessReplica(net, optimizer_of(net), nn.functional.cross_entropy, layout, mine)
        for net, mine in zip(nets, batches, strict=True)
    ]

    def fails(_: int) -> tuple[torch.Tensor]:
        raise ValueError("no bucket")

    replicas[1].arrivals = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no bucket"):
        play_in_process(BSP(), replicas, [Step(0)])


def deep() -> nn.Sequential:
    """Sixteen layers with a weight each."""
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(15)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES, bias=False)).double()


def deep_layout(ranks: int, buckets: int) -> Layout:
    """Sixteen parameters in so many buckets, those of the last layers first."""
    order = list(range(15, -1, -1))
    ends = [16 * bucket // buckets for bucket in range(buckets + 1)]
    return Layout(ranks, 16, tuple(Bucket(1, tuple(order[a:b])) for a, b in pairwise(ends)))


@pytest.mark.parametrize("ranks", [1, 9])
@pytest.mark.parametrize("buckets", [1, 16])
def test_any_number_of_ranks_and_buckets(ranks: int, buckets: int) -> None:
    batches = batches_of(ranks, 2, [3, 2, 4])
    net, weights = deep(), [sum(len(mine[step].labels) for mine in batches) for step in range(2)]
    optimizer = optimizer_of(net)
    for step in range(2):
        optimizer.zero_grad()
        for mine in batches:
            loss = nn.functional.cross_entropy(net(mine[step].inputs), mine[step].labels)
            (loss * len(mine[step].labels) / weights[step]).backward()
        optimizer.step()
    for rule in (*(BSP(overlap=name) for name in OVERLAPS), LocalSGD(every=2)):
        nets, layout = [deep() for _ in range(ranks)], deep_layout(ranks, buckets)
        loss = nn.functional.cross_entropy
        each = zip(nets, batches, strict=True)
        replicas = [InProcessReplica(rank_net, optimizer_of(rank_net), loss, layout, mine) for rank_net, mine in each]
        play_in_process(rule, replicas, [Step(0), Step(1)], ranks)
        for rank_net in nets[1:]:
            close(rank_net, nets[0], 1e-15)
        if isinstance(rule, BSP):
            close(nets[0], net)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_split_parameters_are_averaged_by_their_holders_and_clipped_once(overlap: str, clip: float | None) -> None:
    """Ranks 0 and 1 have the same samples, so do 2 and 3; ranks 0 and 2 hold one part of `second`, 1 and 3 another.

    Both parts are alike here, so that whole models make their gradients; the norm has them twice."""
    pairs = ((0, 2), (1, 3))
    layout = layout_of(4, clip=clip)
    split = tuple(range(NAMES.index("second.weight"), NAMES.index("second.bias") + 1))
    buckets = (Bucket(1, (ORDER[0],)), Bucket(1, split, groups=pairs), Bucket(1, (ORDER[1], ORDER[4])))
    layout = replace(layout, buckets=buckets, filled=())
    shares = batches_of(2, 1, [3, 5])
    nets = train(BSP(overlap=overlap), layout, [shares[0], shares[0], shares[1], shares[1]], [Step(0)])
    serial = model()
    inputs, labels = (torch.cat([share[0][at] for share in shares]) for at in range(2))  # type: ignore[index]
    nn.functional.cross_entropy(serial(inputs), labels).backward()
    squares = {
        name: float(parameter.grad.norm() ** 2)
        for name, parameter in serial.named_parameters()
        if parameter.grad is not None
    }
    norm = sum((2 if name.startswith("second") else 1) * square for name, square in squares.items()) ** 0.5
    for parameter in serial.parameters():
        if parameter.grad is not None and clip is not None:
            parameter.grad.mul_(min(1.0, clip / (norm + 1e-6)))
    optimizer_of(serial).step()
    for net in nets:
        close(net, serial)
