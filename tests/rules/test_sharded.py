"""Sharded updates: losses and weights of the unsharded network, whatever is cut where; programs that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.errors import StepError, UsageError
from unisono.optimizers import LAMB, LARS
from unisono.optimizers.segments import Segment, cut, join
from unisono.placement import one_rank_per_node
from unisono.rules import BSP, Exchange, Sharded, sharded
from unisono.schedules import find
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.draw import draw, picture_of
from unisono.step.in_process import Batch, InProcessReplica, play_in_process
from unisono.step.in_process_shards import InProcessShardedReplica
from unisono.step.layout import Bucket, Layout, Updates, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict
from unisono.step.program import Step, StepProgram
from unisono.step.shards import UNPACK, UPDATE_SHARD
from unisono.step.verify import verify

FEATURES, CLASSES = 5, 3

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers that are used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)))


NAMES = [name for name, _ in Net().named_parameters()]
NUMBER = {name: NAMES.index(name) for name in NAMES}


def model() -> Net:
    torch.manual_seed(3)
    return Net().double()


def layout_of(ranks: int, **changes: Any) -> Layout:
    """All parameters in three buckets; the largest is cut in two."""
    first = NUMBER["first.weight"]
    small = tuple(NUMBER[name] for name in ("unused", "second.bias", "second.weight"))
    last = Bucket(1, (first, NUMBER["first.bias"]), ((7, 20), (0, 4)))
    return replace(Layout(ranks, 5, (Bucket(1, small), Bucket(1, (first,), ((0, 7),)), last)), **changes)


def groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weights of layers decay, biases do not, and learn at another rate."""
    named = list(net.named_parameters())
    return [
        {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": decay},
        {"params": [one for name, one in named if not name.endswith("weight")], "weight_decay": 0.0, "lr": 0.02},
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
    found: list[list[Batch | None]] = []
    for rank in range(ranks):
        mine: list[Batch | None] = []
        for step in steps:
            count = samples[(rank * 7 + step) % len(samples)]
            generator = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
            mine.append(Batch(inputs, inputs[:, :CLASSES].argmax(1)) if count else None)
        found.append(mine)
    return found


def shares_of(whole: Sequence[Batch], ranks: int) -> list[list[Batch | None]]:
    """The same global batches, in equal shares of so many ranks."""
    size = len(whole[0].labels) // ranks
    return [
        [
            Batch(one.inputs[rank * size : (rank + 1) * size], one.labels[rank * size : (rank + 1) * size])
            for one in whole
        ]
        for rank in range(ranks)
    ]


def replicas_of(
    rule: BSP | Sharded, layout: Layout, nets: Sequence[nn.Module], optimizers: Sequence[Any], batches: Sequence[Any]
) -> list[InProcessReplica]:
    loss = nn.functional.cross_entropy
    if isinstance(rule, BSP):
        return [
            InProcessReplica(net, optimizer, loss, layout, mine)
            for net, optimizer, mine in zip(nets, optimizers, batches, strict=True)
        ]
    return [
        InProcessShardedReplica(net, optimizer, loss, layout, mine, rank)
        for rank, (net, optimizer, mine) in enumerate(zip(nets, optimizers, batches, strict=True))
    ]


def train(
    rule: BSP | Sharded, layout: Layout, batches: Sequence[Any], events: Sequence[Step], name: str, seed: int = 0
) -> tuple[list[Net], list[torch.optim.Optimizer]]:
    nets = [model() for _ in range(layout.ranks)]
    optimizers = [OPTIMIZERS[name](net) for net in nets]
    play_in_process(rule, replicas_of(rule, layout, nets, optimizers, batches), events, seed)
    return nets, optimizers


def close(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=tolerance, msg=name)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 4),
    st.sampled_from(sorted(OVERLAPS)),
    st.sampled_from(Updates),
    st.sampled_from([None, 0.05]),
    st.sampled_from([[4], [5, 2, 3], [4, 0, 2, 3, 1]]),
    st.lists(st.booleans(), max_size=3),
    st.sampled_from(sorted(OPTIMIZERS)),
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
    seed: int,
) -> None:
    """Uneven and empty batches, accumulation, clipping, decay of some parameters, one without a gradient."""
    events = [Step(number, one) for number, one in enumerate([*synchronize, True, True])]
    batches = batches_of(ranks, range(len(events)), samples)
    layout = layout_of(ranks, updates=updates, clip=clip, deferred=updates is not Updates.OUTSIDE)
    sharded = replace(layout, layer_norms=name in ("lars", "lamb"))
    nets, _ = train(Sharded(overlap=overlap), sharded, batches, events, name, seed)
    for net in nets[1:]:
        close(net, nets[0], 0.0)
    reference, _ = train(BSP(), replace(layout, updates=Updates.WHOLE, deferred=True), batches, events, name)
    close(nets[0], reference[0])


@pytest.mark.parametrize(
    ("ranks", "name"),
    [*((ranks, name) for ranks in (1, 2, 4) for name in sorted(OPTIMIZERS)), (3, "adamw"), (8, "adam"), (8, "lamb")],
)
def test_losses_of_50_steps_are_those_of_one_rank(ranks: int, name: str) -> None:
    """With clipping, in any order of tasks; 24 samples a step, whatever the number of ranks."""
    whole = [one for one in batches_of(1, range(50), [24])[0] if one is not None]
    norms = name in ("lars", "lamb")
    events = [Step(number) for number in range(50)]
    reference = losses(BSP(), layout_of(1, clip=0.3), whole, events, name)
    found = losses(Sharded(), layout_of(ranks, clip=0.3, layer_norms=norms), whole, events, name)
    assert found == pytest.approx(reference, abs=1e-9)
    assert reference[-1] < reference[0]


def losses(
    rule: BSP | Sharded, layout: Layout, whole: Sequence[Batch], events: Sequence[Step], name: str
) -> list[float]:
    nets = [model() for _ in range(layout.ranks)]
    optimizers = [OPTIMIZERS[name](net) for net in nets]
    found = []
    for event in events:
        batch = whole[event.number]
        found.append(float(nn.functional.cross_entropy(nets[-1](batch.inputs), batch.labels).detach()))
        shares = shares_of([batch], layout.ranks)
        play_in_process(rule, replicas_of(rule, layout, nets, optimizers, shares), [event], seed=event.number)
    return found


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_run_resumes_on_other_numbers_of_ranks(name: str) -> None:
    """State is joined as if unsharded, and cut again: on 4, 1, 3 and 8 ranks; the last part is unsharded."""
    whole = [one for one in batches_of(1, range(20), [24])[0] if one is not None]
    norms, at = name in ("lars", "lamb"), 0
    net, state = model(), dict[int, dict[str, Any]]()
    for ranks, steps in ((4, 4), (1, 4), (3, 4), (8, 4)):
        events = [Step(number) for number in range(at, at + steps)]
        nets = [model() for _ in range(ranks)]
        optimizers = [OPTIMIZERS[name](one) for one in nets]
        layout = layout_of(ranks, layer_norms=norms)
        shares = shares_of(whole[at : at + steps], ranks)
        replicas = replicas_of(Sharded(), layout, nets, optimizers, shares)
        for one, optimizer, replica in zip(nets, optimizers, replicas, strict=True):
            one.load_state_dict(net.state_dict())
            assert isinstance(replica, InProcessShardedReplica)
            for segment in segments(replica):
                if segment.number in state:
                    optimizer.state |= cut(state[segment.number], list(one.parameters())[segment.number], [segment])  # type: ignore[arg-type]
        play_in_process(Sharded(), replicas, events)
        net, at = nets[0], at + steps
        state = whole_state(optimizers, net)
    optimizer = OPTIMIZERS[name](net)
    for number, parameter in enumerate(net.parameters()):
        if state.get(number):
            optimizer.state[parameter] = state[number]
    play_in_process(
        BSP(),
        replicas_of(BSP(), layout_of(1), [net], [optimizer], shares_of(whole[at:], 1)),
        [Step(n) for n in range(at, 20)],
    )
    alone, _ = train(BSP(), layout_of(1), shares_of(whole, 1), [Step(number) for number in range(20)], name)
    close(net, alone[0])


def segments(replica: InProcessShardedReplica) -> Iterator[Segment]:
    for placed in replica.segments.values():
        yield from (one.segment for one in placed)


def whole_state(optimizers: Sequence[torch.optim.Optimizer], net: nn.Module) -> dict[int, dict[str, Any]]:
    parts: dict[int, list[Any]] = {number: [] for number in range(len(NAMES))}
    for optimizer in optimizers:
        for segment, state in optimizer.state.items():
            parts[segment.number].append((segment, state))  # type: ignore[attr-defined]
    return {number: join(parts[number], one) for number, one in enumerate(net.parameters())}


def test_a_step_that_the_program_leaves_out_changes_no_weight() -> None:
    layout = layout_of(2, updates=Updates.OUTSIDE, deferred=False)
    nets = [model(), model()]
    replicas = replicas_of(
        Sharded(), layout, nets, [OPTIMIZERS["adam"](net) for net in nets], batches_of(2, range(1), [4])
    )
    for replica in replicas:
        replica.outside = skipping(replica.outside)  # type: ignore[method-assign]
    play_in_process(Sharded(), replicas, [Step(0)])
    close(nets[0], model(), 0.0)


def skipping(outside: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda task: None if task.operation.name == "step" else outside(task)


def test_the_state_of_4_ranks_is_a_quarter_each() -> None:
    """In one process; `tests/mpi/reducer/test_sharded.py` counts it over MPI, with the buckets of a real run."""
    whole = [one for one in batches_of(1, range(2), [24])[0] if one is not None]
    _, optimizers = train(Sharded(), layout_of(4), shares_of(whole, 4), [Step(0), Step(1)], "adam")
    sizes = [sum(state["exp_avg"].numel() for state in one.state.values()) for one in optimizers]
    used = sum(one.numel() for name, one in model().named_parameters() if name != "unused")
    assert sum(sizes) == used
    assert max(sizes) <= used / 4 + 3  # one for each bucket: shards are cut by element


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_programs_are_right(overlap: str, ranks: int) -> None:
    for buckets in (1, 2, 5):
        for updates in Updates:
            for clip, norms in ((None, False), (1.0, False), (None, True), (1.0, True)):
                layout = replace(
                    even_layout(ranks, buckets),
                    updates=updates,
                    deferred=updates is not Updates.OUTSIDE,
                    clip=clip,
                    layer_norms=norms,
                    buffers=bool(buckets % 2),
                )
                steps = [Step(0), Step(1, synchronize=False), Step(2), Step(3)]
                verify(Sharded(overlap=overlap), layout, steps, seed=buckets)


@dataclass(frozen=True)
class Broken(Sharded):
    """Sharded without the tasks of this name, or with its first in the place of the second."""

    missing: str = ""
    instead: tuple[str, str] = ("", "")

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        program = [task for task in super().__call__(event, rank, layout) if task.operation.name != self.missing]
        if self.instead[0]:
            one, other = (
                next(place for place, task in enumerate(program) if str(task) == name) for name in self.instead
            )
            program[one], program[other] = program[other], program[one]
        return tuple(program)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Broken(missing="update"), "all_gather 1 gathers a bucket whose shard was not updated"),
        (Broken(missing="all_gather"), "unpack 1 unpacks a bucket that was not gathered"),
        (
            Broken(missing="unpack"),
            "overwrites updated weights that were not unpacked|a value orders them|were not unpacked",
        ),
        (Broken(missing="reduce_scatter"), "applies bucket 1 before its gradients are set"),
        (Broken(missing="pack"), "sends a bucket in which nothing was packed"),
        (Broken(instead=("update 1", "reduce_scatter 1")), "applies bucket 1 before its gradients are set"),
        (Broken(instead=("all_gather 1", "update 1")), "gathers a bucket whose shard was not updated"),
    ],
)
def test_wrong_programs_are_refused(rule: Broken, message: str) -> None:
    with pytest.raises(StepError, match=message):
        verify(rule, even_layout(3, 1), [Step(0), Step(1)])


def test_norms_are_taken_of_all_buckets() -> None:
    rule = Broken(instead=("clip 0", "reduce_scatter 2"))
    with pytest.raises(StepError, match="clip 0 takes norms before all of bucket 2 is there, or after"):
        verify(rule, replace(even_layout(2, 2), clip=1.0), [Step(0)])


def test_the_picture_is_the_one_that_is_drawn() -> None:
    drawn = draw(picture_of(Sharded(overlap="chain"), even_layout(4, 2), 2))
    lines = [line.rstrip() for line in drawn.splitlines()]
    assert "\n".join(lines) in (sharded.__doc__ or "")
    page = (Path(__file__).parents[2] / "docs/rules.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {line}".rstrip() for line in lines) in page


def test_the_bytes_and_rounds_of_the_docstring() -> None:
    """On a link where only bytes cost: each half of an allreduce's 1.5 n on 4 ranks; clipping costs none."""
    assert "0.75 n bytes on each rank" in (sharded.__doc__ or "").replace("\n", " ")
    layout = even_layout(4, 8)
    nbytes = sum(one.nbytes for one in layout.buckets)
    computing = Computing(tuple(map(float, range(8))), tuple(map(float, range(16, 8, -1))), 16.0, 1.0 / nbytes)
    costs = Costs(layout, computing, Cost(0.0, 1.5 / nbytes))
    assert predict(Sharded(), costs).communicating == pytest.approx(1.5)
    assert predict(Sharded(clip=1.0), costs).communicating == pytest.approx(1.5)
    program = Sharded()(Step(0), 0, layout)
    for name, share in (("reduce_scatter", 0.75), ("all_gather", 0.75), ("update", 0.25)):
        prices = [task.operation.price(task, costs).seconds for task in program if task.operation.name == name]
        assert sum(prices) == pytest.approx(share)
    assert "1 + 1, by `ring` 3 + 3" in (sharded.__doc__ or "")
    for algorithm, rounds in (("direct", 1), ("ring", 3)):
        family = find(algorithm, one_rank_per_node(4))
        for one in (family.reduce_scatter, family.all_gather):
            assert one is not None
            assert max(len(lane) for lane in one(0, 4).lanes) == rounds


def test_weights_of_first_layers_are_gathered_first() -> None:
    program = Sharded()(Step(0), 0, even_layout(4, 3))
    assert [task.key for task in program if task.operation.name == "all_gather"] == [3, 2, 1]
    assert [task.key for task in program if task.operation is UNPACK] == [3, 2, 1]
    assert [task.key for task in program if task.operation is UPDATE_SHARD] == [1, 2, 3]


def test_a_norm_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Sharded\(clip=0\): the norm must be above 0, or None"):
        Sharded(clip=0)


def test_a_wire_rounds_gradients_and_leaves_ranks_equal() -> None:
    rule = Sharded(Exchange("direct", "bfloat16"))
    batches, events = batches_of(3, range(3), [4]), [Step(number) for number in range(3)]
    nets, _ = train(rule, layout_of(3), batches, events, "momentum")
    exact, _ = train(BSP(), layout_of(3), batches, events, "momentum")
    close(nets[1], nets[0], 0.0)
    close(nets[0], exact[0], 0.02)
    assert not torch.equal(nets[0].first.weight, exact[0].first.weight)
