"""DiLoCo: its picture, what it refuses, what `verify` refuses of programs like it, and its weights by other means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.step.test_verify import layouts
from tests.testing.test_replica import batches_of, close, layout_of, model, optimizer_of, train
from torch import nn

from unisono.errors import StepError, UsageError
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD, diloco
from unisono.rules.outer import PACK_CHANGE, sum_with_feedback
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Layout, Updates, even_layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.predict import predict
from unisono.step.program import Step, StepProgram, Task
from unisono.step.replica import ANCHOR, RESIDUAL, SUM_RESIDUAL, RuleMemory
from unisono.step.verify import verify
from unisono.testing import InProcessReplica, play_in_process
from unisono.wires import encoded_share, wire_of


def steps(count: int) -> list[Step]:
    return [Step(step) for step in range(count)]


def test_the_picture_shows_the_programs() -> None:
    rule, layout = DiLoCo(every=16), even_layout(4, 8)
    marks: dict[int, list[str]] = {fragment: [" "] * 64 for fragment in range(4)}
    for step in range(16):
        tasks = [(task.operation.name, (task.key - 1) % 4) for task in rule(Step(step), 0, layout)]
        for fragment in range(4):
            if ("pack_change", fragment) in tasks:
                marks[fragment][4 * step : 4 * step + 4] = "p═══"
            if ("outer_step", fragment) in tasks:
                marks[fragment][4 * step] = "o"
    drawn = [line.strip() for line in (diloco.__doc__ or "").splitlines()]
    for fragment, row in marks.items():
        line = next(line for line in drawn if line.startswith(f"fragment {fragment} "))
        assert line.removeprefix(f"fragment {fragment} ").strip() == "".join(row).strip()
        assert (line.index("p") - len("step          0") + 1) // 4 == row.index("p") // 4
    numbers = next(line for line in drawn if line.startswith("step "))
    assert [int(label) for label in numbers.split()[1:]] == list(range(16))


def test_the_bytes_of_the_docstring() -> None:
    """On a link where only bytes cost: 1.5 n a step for BSP, and for int4 and every = 16 a sixteenth of 4.25 / 32."""
    layout = even_layout(4, 8)
    nbytes = sum(bucket.nbytes for bucket in layout.buckets)
    computing = Computing(tuple(map(float, range(8))), tuple(map(float, range(16, 8, -1))), 16.0)
    costs = Costs(layout, computing, Cost(0.0, 1.5 / nbytes))  # an allreduce of 4 ranks sends 1.5 n
    assert predict(BSP(), costs).communicating == pytest.approx(1.5)
    assert predict(DiLoCo(), costs).communicating == pytest.approx(1.5 / 16)
    encoded = replace(costs, collective=Cost(0.0, 1.5 * encoded_share("int4") / nbytes))  # costs are those of the wire
    int4 = predict(DiLoCo(Exchange(wire="int4")), encoded).communicating
    assert int4 == pytest.approx(1.5 * 4.25 / 32 / 16)
    assert "is 0.0125 n bytes in a step" in (diloco.__doc__ or "").replace("\n", " ")
    assert round(int4, 4) == 0.0125


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 3}, r"DiLoCo\(every=3, fragments=4, delay=1\): .* 3 // 4 = 0 steps until the next"),
        ({"every": 16, "delay": 4}, r"16 // 4 = 4 steps .* more than the delay; set every to 20 or more"),
        ({"fragments": 0}, "DiLoCo: fragments = 0, but it has to be at least 1"),
        ({"delay": -1}, "DiLoCo: delay = -1, but it has to be at least 0"),
        ({"outer_rate": 0.0}, "DiLoCo: outer_rate = 0.0, but it has to be above 0"),
        ({"outer_momentum": 1.0}, "DiLoCo: outer_momentum = 1.0, but it has to be below 1"),
        ({"every": "often"}, "DiLoCo: every = 'often' is not a whole number"),
        ({"exchange": Exchange("halving", "int4")}, "set algorithm to 'direct' or 'auto'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DiLoCo(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_it_keeps_its_guarantees(overlap: str, ranks: int) -> None:
    for delay, fragments, buckets in ((0, 1, 1), (0, 4, 8), (1, 2, 3), (2, 1, 8), (2, 4, 3)):
        rule = DiLoCo(overlap=overlap, every=12, fragments=fragments, delay=delay)
        verify(rule, even_layout(ranks, buckets), steps(26), seed=buckets)


@given(
    layouts(),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 6),
    st.sampled_from(sorted(OVERLAPS)),
    st.integers(1, 14),
    st.integers(0, 1 << 20),
)
def test_random_layouts(
    layout: Layout, fragments: int, delay: int, more: int, overlap: str, count: int, seed: int
) -> None:
    every = fragments * (delay + 1) + more
    rule = DiLoCo(Exchange(wire="int8"), overlap, every=every, fragments=fragments, delay=delay)
    verify(rule, layout, steps(count), seed)


Change = Callable[[int, int, StepProgram], Iterable[Task]]


@dataclass(frozen=True)
class Broken(DiLoCo):
    """DiLoCo whose programs are changed, by rank and step."""

    change: Change = lambda _, __, program: program

    def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
        return tuple(self.change(rank, event.number, super().__call__(event, rank, layout)))


def without(name: str, ranks: set[int], since: int = 0) -> Change:
    """Leave the operations of a name out on some ranks, from a step on."""
    return lambda rank, step, program: (
        task for task in program if task.operation.name != name or rank not in ranks or step < since
    )


def twice(name: str) -> Change:
    return lambda _, __, program: (
        repeated for task in program for repeated in ((task, task) if task.operation.name == name else (task,))
    )


def packed_by_0_as_by_1(rank: int, _: int, program: StepProgram) -> Iterable[Task]:
    """A pack that leaves out what rank 0 has: its contribution is missing."""

    def symbolic(ranks: object, task: Task) -> None:
        PACK_CHANGE.symbolic(ranks, task)  # type: ignore[arg-type]
        for part in ranks[0].buckets[task.key].parts.values():  # type: ignore[index]
            part.clear()

    empty = replace(PACK_CHANGE, symbolic=symbolic)
    return (task._replace(operation=empty) if task.operation is PACK_CHANGE and not rank else task for task in program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (packed_by_0_as_by_1, r"a mean over 3 ranks for parameter \d, and its bucket has the sum of ranks \[1, 2\]"),
        (
            without("exchange_change", {0, 1, 2}),
            r"a mean over 3 ranks .* the sum of ranks \[\d\], with",
        ),
        (twice("exchange_change"), r"the sum of ranks \[0, 1, 2\], with \[0, 1, 2\] doubled"),
        (without("pack_change", {1}), "rank 1: .* needs .*a change of weights in bucket ., which holds nothing"),
        (twice("pack_change"), "before the outer step that applies the last one"),
        (twice("outer_step"), "outer_step . needs a change of weights in bucket ., which holds nothing"),
        (without("outer_step", {0, 1, 2}), "before the outer step that applies the last one"),
        (without("outer_step", {0, 1, 2}, since=12), "has had 1 outer steps in 16 steps, which should take 2"),
        (without("outer_step", {2}, since=12), "ranks 0 and 2 end with different anchors"),
        (without("outer_step", {2}), "sums changes of parameter . from different anchors on ranks 0 and 2|before the"),
        (without("exchange_change", {1}), "exchange_change . of rank . is missing on rank 1|of their group is"),
    ],
)
def test_programs_that_lose_or_double_a_change_are_refused(change: Change, message: str) -> None:
    rule = Broken(every=8, fragments=2, delay=1, change=change)
    with pytest.raises(StepError, match=message):
        verify(rule, even_layout(3, 4), steps(16), seed=1)


def outer_by_torch(ranks: int, count: int, every: int, rate: float, momentum: float, nesterov: bool) -> nn.Module:
    """One fragment without delay: inner steps in plain loops, and PyTorch's SGD as the outer optimizer."""
    batches = batches_of(ranks, count, [4])
    anchor, nets = model(), [model() for _ in range(ranks)]
    outer = torch.optim.SGD(anchor.parameters(), rate, momentum, nesterov=nesterov)
    inner = [optimizer_of(net) for net in nets]
    for step in range(count):
        for net, optimizer, mine in zip(nets, inner, batches, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(mine[step].inputs), mine[step].labels).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for parameter, *theirs in zip(anchor.parameters(), *(net.parameters() for net in nets), strict=True):
                parameter.grad = torch.stack([parameter.detach() - its.detach() for its in theirs]).mean(0)
            outer.step()
            for net in nets:
                net.load_state_dict(anchor.state_dict())
    return anchor


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
@pytest.mark.parametrize(("ranks", "updates"), zip([1, 2, 3], Updates, strict=True))
def test_the_outer_optimizer_is_pytorchs(ranks: int, updates: Updates, momentum: float, nesterov: bool) -> None:
    layout = layout_of(ranks, updates=updates, deferred=updates is not Updates.OUTSIDE)
    rule = DiLoCo(every=3, fragments=1, delay=0, outer_momentum=momentum, nesterov=nesterov)
    nets = train(rule, layout, batches_of(ranks, 9, [4]), steps(9))
    expected = outer_by_torch(ranks, 9, 3, 0.7, momentum, nesterov)
    for net in nets:
        close(net, nets[0], 0.0)
        close(net, expected)


@pytest.mark.parametrize(("ranks", "every"), [(1, 2), (2, 5), (4, 1)])
def test_without_momentum_at_rate_1_it_is_local_sgd(ranks: int, every: int) -> None:
    batches, count = batches_of(ranks, 10, [4, 3]), 10
    rule = DiLoCo(every=every, fragments=1, delay=0, outer_rate=1.0, outer_momentum=0.0)
    for net, other in zip(
        train(rule, layout_of(ranks), batches, steps(count)),
        train(LocalSGD(every=every), layout_of(ranks), batches, steps(count)),
        strict=True,
    ):
        close(net, other)


def test_the_progress_since_sending_is_kept() -> None:
    """A delay without momentum, on inner steps that do not depend on the weights: only the time differs."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * self.weight

    batches = batches_of(2, 8, [4])
    for mine in batches:
        for index, batch in enumerate(mine):
            mine[index] = batch._replace(inputs=batch.inputs[:, :3])  # type: ignore[union-attr]
    weights = []
    for delay in (0, 3):
        nets = [Constant(), Constant()]
        replicas = [
            InProcessReplica(
                net, torch.optim.SGD(net.parameters(), 0.1), lambda out, _: out.sum(), even_layout(2, 1), mine
            )
            for net, mine in zip(nets, batches, strict=True)
        ]
        rule = DiLoCo(every=8, fragments=1, delay=delay, outer_rate=0.5, outer_momentum=0.0)
        play_in_process(rule, replicas, steps(8))
        weights.append([net.weight.detach().clone() for net in nets])
        sent = 8 - delay  # steps whose change was exchanged
        moves = [[-0.1 * batch.inputs.sum(0) for batch in mine] for mine in batches]  # type: ignore[union-attr]
        anchor = 0.5 * (sum(moves[0][:sent]) + sum(moves[1][:sent])) / 2  # type: ignore[arg-type,operator]
        for net, mine in zip(nets, moves, strict=True):
            late = sum(mine[sent:], torch.zeros(3, dtype=torch.float64))
            torch.testing.assert_close(net.weight.detach(), anchor + late, rtol=0, atol=1e-12)
    assert not torch.equal(*weights[1])


@pytest.mark.parametrize(("ranks", "wire"), [(1, "int8"), (2, "float16"), (3, "int4"), (3, "int8")])
def test_nothing_is_lost_in_a_wire(ranks: int, wire: str) -> None:
    """The anchor's moves and all residuals are together what the ranks' inner steps have moved."""
    layout, count = layout_of(ranks), 12
    nets = [model() for _ in range(ranks)]
    replicas = [
        InProcessReplica(net, optimizer_of(net), nn.functional.cross_entropy, layout, mine)
        for net, mine in zip(nets, batches_of(ranks, count, [4]), strict=True)
    ]
    changes = {key: torch.zeros(0) for key in layout.keys}
    for replica in replicas:

        def filled(
            key: int, flat: torch.Tensor, fill: Callable[[int, torch.Tensor], None] = replica.fill_bucket
        ) -> None:
            changes[key] = changes[key] + flat if len(changes[key]) else flat.clone()
            fill(key, flat)

        replica.fill_bucket = filled  # type: ignore[method-assign]
    begin = {key: replicas[0].read_weights(key) for key in layout.keys}
    rule = DiLoCo(Exchange(wire=wire), every=3, fragments=1, delay=0, outer_rate=1.0, outer_momentum=0.0)
    play_in_process(rule, replicas, steps(count))
    for key in layout.keys:
        applied = begin[key] - replicas[0].kept[ANCHOR, key]
        left = sum(replica.kept[RESIDUAL, key] for replica in replicas)
        left = left + torch.cat([replica.kept[SUM_RESIDUAL, key] for replica in replicas])
        torch.testing.assert_close(applied + left, changes[key], rtol=0, atol=1e-12)
        assert left.abs().max() > 0
        for replica in replicas[1:]:
            assert torch.equal(replica.kept[ANCHOR, key], replicas[0].kept[ANCHOR, key])


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_local_sgd_with_a_wire_follows_the_exact_mean(wire: str) -> None:
    batches, count = batches_of(3, 24, [4]), 24
    exact = train(LocalSGD(every=4), layout_of(3), batches, steps(count))[0]
    nets = train(LocalSGD(Exchange(wire=wire), every=4), layout_of(3), batches, steps(count))
    for net in nets:
        close(net, nets[0], 0.0)
        close(net, exact, 0.02 if wire == "int8" else 0.2)
    assert not torch.equal(nets[0].first.weight, exact.first.weight)


def test_quantized_changes_are_on_the_host_whatever_the_default_device() -> None:
    alone: Any = SimpleNamespace(size=1, rank=0, all_to_all=lambda sent, _: sent, all_gather=lambda *_: None)
    changes = torch.tensor([1.0, 0.5])
    with torch.device("meta"):
        sum_with_feedback(changes, wire_of("int8", torch.float32), RuleMemory(), 1, alone)
    torch.testing.assert_close(changes, torch.tensor([1.0, 0.5]), rtol=0, atol=0.01)
