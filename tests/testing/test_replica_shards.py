"""Sharded updates in one process: losses and weights of the unsharded network, whatever is cut where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testing.test_replica import CLASSES, FEATURES, NAMES, Net, close, layout_of, model
from torch import nn

from unisono.optimizers import LAMB, LARS
from unisono.optimizers.sharded import Segment, cut, dense_strides, join
from unisono.rules import BSP, Exchange, Sharded
from unisono.step.layout import Bucket, Layout, Updates
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import Step
from unisono.testing import Batch, InProcessReplica, play_in_process

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


NUMBER = {name: NAMES.index(name) for name in NAMES}


def groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weights of layers decay, biases do not, and learn at another rate."""
    named = list(net.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name.endswith("weight")], "weight_decay": decay},
        {
            "params": [parameter for name, parameter in named if not name.endswith("weight")],
            "weight_decay": 0.0,
            "lr": 0.02,
        },
    ]


OPTIMIZERS: dict[str, Optimizers] = {
    "momentum": lambda net: torch.optim.SGD(groups(net, 0.01), 0.1, momentum=0.9),
    "nesterov": lambda net: torch.optim.SGD(groups(net, 0.01), 0.1, momentum=0.9, nesterov=True),
    "adam": lambda net: torch.optim.Adam(groups(net, 0.01), 0.01),
    "adamw": lambda net: torch.optim.AdamW(groups(net, 0.1), 0.01, betas=(0.8, 0.95)),
    "lars": lambda net: LARS(groups(net, 0.01), 0.5, trust=0.02),
    "lamb": lambda net: LAMB(groups(net, 0.01), 0.01),
}


def batches_of(ranks: int, steps: range, samples: Sequence[int]) -> list[list[Batch | None]]:
    """Batches of each rank in these steps; `samples` has the number of samples of each, over and over; 0 is none."""
    batches: list[list[Batch | None]] = []
    for rank in range(ranks):
        mine: list[Batch | None] = []
        for step in steps:
            count = samples[(rank * 7 + step) % len(samples)]
            generator = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
            mine.append(Batch(inputs, inputs[:, :CLASSES].argmax(1)) if count else None)
        batches.append(mine)
    return batches


def shares_of(batches: Sequence[Batch], ranks: int) -> list[list[Batch | None]]:
    """The same global batches, in equal shares of so many ranks."""
    size = len(batches[0].labels) // ranks
    return [
        [
            Batch(batch.inputs[rank * size : (rank + 1) * size], batch.labels[rank * size : (rank + 1) * size])
            for batch in batches
        ]
        for rank in range(ranks)
    ]


def replicas_of(
    layout: Layout, nets: Sequence[nn.Module], optimizers: Sequence[Any], batches: Sequence[Any]
) -> list[InProcessReplica]:
    loss = nn.functional.cross_entropy
    return [
        InProcessReplica(net, optimizer, loss, layout, mine)
        for net, optimizer, mine in zip(nets, optimizers, batches, strict=True)
    ]


def train(
    rule: BSP | Sharded, layout: Layout, batches: Sequence[Any], events: Sequence[Step], name: str, seed: int = 0
) -> tuple[list[Net], list[torch.optim.Optimizer]]:
    nets = [model() for _ in range(layout.ranks)]
    optimizers = [OPTIMIZERS[name](net) for net in nets]
    play_in_process(rule, replicas_of(layout, nets, optimizers, batches), events, seed)
    return nets, optimizers


@settings(max_examples=15)
@given(
    st.integers(1, 4),
    st.sampled_from(sorted(OVERLAPS)),
    st.sampled_from(Updates),
    st.sampled_from([None, 0.05]),
    st.sampled_from([[4], [5, 2, 3], [4, 0, 2, 3, 1]]),
    st.lists(st.booleans(), max_size=3),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([(), (1, 2, 1, 2, 3, 3), (1, 1, 2, 3, 3, 2)]),
    st.integers(0, 1 << 20),
)
def test_sharded_updates_are_those_of_the_unsharded_network(
    ranks: int,
    overlap: str,
    updates: Updates,
    clip: float | None,
    samples: list[int],
    synchronize: list[bool],
    name: str,
    halves: tuple[int, ...],
    seed: int,
) -> None:
    """Uneven and empty batches, accumulation, clipping, decay of some parameters, one without a gradient."""
    events = [Step(step, synchronized) for step, synchronized in enumerate([*synchronize, True, True])]
    batches = batches_of(ranks, range(len(events)), samples)
    layout = layout_of(ranks, updates=updates, clip=clip, deferred=updates is not Updates.OUTSIDE)
    sharded = replace(layout, layer_norms=name in ("lars", "lamb"), halves=halves)
    nets, _ = train(Sharded(overlap=overlap), sharded, batches, events, name, seed)
    for net in nets[1:]:
        close(net, nets[0], 0.0)
    reference, _ = train(BSP(), replace(layout, updates=Updates.WHOLE, deferred=True), batches, events, name)
    close(nets[0], reference[0], 1e-9)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [*((4, name) for name in sorted(OPTIMIZERS)), (1, "adam"), (8, "lamb")],
)
def test_losses_are_those_of_one_rank(ranks: int, name: str) -> None:
    """With clipping, in any order of tasks; 24 samples a step, whatever the number of ranks."""
    batches = [batch for batch in batches_of(1, range(12), [24])[0] if batch is not None]
    norms = name in ("lars", "lamb")
    events = [Step(step) for step in range(12)]
    reference = losses(BSP(), layout_of(1, clip=0.3), batches, events, name)
    sharded = losses(Sharded(), layout_of(ranks, clip=0.3, layer_norms=norms), batches, events, name)
    assert sharded == pytest.approx(reference, abs=1e-9)
    assert reference[-1] < reference[0]


def losses(
    rule: BSP | Sharded, layout: Layout, batches: Sequence[Batch], events: Sequence[Step], name: str
) -> list[float]:
    nets = [model() for _ in range(layout.ranks)]
    optimizers = [OPTIMIZERS[name](net) for net in nets]
    values = []
    for event in events:
        batch = batches[event.number]
        values.append(float(nn.functional.cross_entropy(nets[-1](batch.inputs), batch.labels).detach()))
        shares = shares_of([batch], layout.ranks)
        play_in_process(rule, replicas_of(layout, nets, optimizers, shares), [event], seed=event.number)
    return values


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_run_resumes_on_other_numbers_of_ranks(name: str) -> None:
    """State is joined as if unsharded, and cut again: on 4, 1, 3 and 8 ranks; the last part is unsharded."""
    batches = [batch for batch in batches_of(1, range(10), [24])[0] if batch is not None]
    norms, at = name in ("lars", "lamb"), 0
    net, state = model(), dict[int, dict[str, Any]]()
    for ranks, steps in ((4, 2), (1, 2), (3, 2), (8, 2)):
        events = [Step(step) for step in range(at, at + steps)]
        nets = [model() for _ in range(ranks)]
        optimizers = [OPTIMIZERS[name](rank_net) for rank_net in nets]
        layout = layout_of(ranks, layer_norms=norms)
        shares = shares_of(batches[at : at + steps], ranks)
        replicas = replicas_of(layout, nets, optimizers, shares)
        for rank, (rank_net, optimizer, replica) in enumerate(zip(nets, optimizers, replicas, strict=True)):
            rank_net.load_state_dict(net.state_dict())
            replica.rank = rank
            for segment in segments(replica):
                if segment.parameter in state:
                    parameter = list(rank_net.parameters())[segment.parameter]
                    optimizer.state |= cut(state[segment.parameter], parameter, dense_strides(parameter), [segment])  # type: ignore[arg-type]
        play_in_process(Sharded(), replicas, events)
        net, at = nets[0], at + steps
        state = whole_state(optimizers, net)
    optimizer = OPTIMIZERS[name](net)
    for index, parameter in enumerate(net.parameters()):
        if state.get(index):
            optimizer.state[parameter] = state[index]
    play_in_process(
        BSP(),
        replicas_of(layout_of(1), [net], [optimizer], shares_of(batches[at:], 1)),
        [Step(step) for step in range(at, 10)],
    )
    alone, _ = train(BSP(), layout_of(1), shares_of(batches, 1), [Step(step) for step in range(10)], name)
    close(net, alone[0], 1e-9)


def segments(replica: InProcessReplica) -> Iterator[Segment]:
    for placed in replica.segments.values():
        yield from (placed_segment.segment for placed_segment in placed)


def whole_state(optimizers: Sequence[torch.optim.Optimizer], net: nn.Module) -> dict[int, dict[str, Any]]:
    parts: dict[int, list[Any]] = {index: [] for index in range(len(NAMES))}
    for optimizer in optimizers:
        for segment, state in optimizer.state.items():
            parts[segment.parameter].append((segment, state))  # type: ignore[attr-defined]
    return {
        index: join(parts[index], parameter, dense_strides(parameter))
        for index, parameter in enumerate(net.parameters())
    }


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_step_that_some_programs_leave_out_changes_no_weight(ranks: tuple[int, ...]) -> None:
    layout = layout_of(2, updates=Updates.OUTSIDE, deferred=False)
    nets = [model(), model()]
    replicas = replicas_of(layout, nets, [OPTIMIZERS["adam"](net) for net in nets], batches_of(2, range(1), [4]))
    for rank in ranks:
        replicas[rank].outside = skipping(replicas[rank].outside)  # type: ignore[method-assign]
    play_in_process(Sharded(), replicas, [Step(0)])
    for net in nets:
        close(net, model(), 0.0)


def skipping(outside: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda task: None if task.operation.name == "step" else outside(task)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw", "lamb"])
def test_4_ranks_have_a_quarter_of_the_state_each(name: str) -> None:
    """Bytes of all tensors, at most 0.26 of the unsharded; `tests/mpi/reducer/test_sharded.py` counts them over MPI."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, CLASSES)).double()
    batches = [batch for batch in batches_of(1, range(2), [24])[0] if batch is not None]
    sizes = []
    for ranks, rule in ((1, BSP()), (4, Sharded())):
        layout = replace(Layout(ranks, 4, (Bucket(1, (3, 2)), Bucket(1, (1, 0)))), layer_norms=name == "lamb")
        nets = [copy.deepcopy(wide) for _ in range(ranks)]
        optimizers = [OPTIMIZERS[name](net) for net in nets]
        play_in_process(rule, replicas_of(layout, nets, optimizers, shares_of(batches, ranks)), [Step(0), Step(1)])
        sizes.append([nbytes(optimizer) for optimizer in optimizers])
    assert max(sizes[1]) <= 0.26 * sizes[0][0]


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def test_a_wire_rounds_gradients_and_leaves_ranks_equal() -> None:
    rule = Sharded(Exchange("direct", "bfloat16"))
    batches, events = batches_of(3, range(3), [4]), [Step(step) for step in range(3)]
    nets, _ = train(rule, layout_of(3), batches, events, "momentum")
    exact, _ = train(BSP(), layout_of(3), batches, events, "momentum")
    close(nets[1], nets[0], 0.0)
    close(nets[0], exact[0], 0.02)
    assert not torch.equal(nets[0].first.weight, exact[0].first.weight)


@pytest.mark.parametrize("rule", [BSP, Sharded])
def test_exact_sums_leave_ranks_equal_and_are_those_of_floats_up_to_the_last_bits(rule: type[BSP]) -> None:
    batches, events = batches_of(3, range(3), [4]), [Step(step) for step in range(3)]
    nets, _ = train(rule(Exchange(wire="exact")), layout_of(3), batches, events, "momentum")
    floats, _ = train(BSP(), layout_of(3), batches, events, "momentum")
    close(nets[1], nets[0], 0.0)
    close(nets[0], floats[0], 1e-6)
