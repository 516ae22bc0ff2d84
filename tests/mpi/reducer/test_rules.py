"""Rules on real ranks: what they train is what one process plays, and averaging weights is averaging gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.mpi.reducer.shares import batches
from tests.rules.largest import Largest
from torch import nn

import unisono
from unisono.errors import OperationError, UsageError
from unisono.reducer import reducer_of
from unisono.rules import EASGD, LocalSGD
from unisono.step.layout import Layout
from unisono.step.overlaps import OVERLAPS
from unisono.step.program import RankGroup, Step, StepProgram
from unisono.world import World

SMALL = unisono.Exchange(bucket_bytes=20_000)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def trained(
    world: World, rule: unisono.BSP | LocalSGD, steps: int = 12, rate: float = 0.1, decay: float = 1e-3
) -> list[torch.Tensor]:
    """The weights after some steps of a Trainer; all ranks have as many samples."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)
    trainer = unisono.Trainer(model, world, rule, optimizer)
    for inputs, labels in batches(world, steps, 12):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    return [parameter.detach().clone() for parameter in model.parameters()]


def close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for mine, its in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


def assert_trained(world: World, weights: Sequence[torch.Tensor]) -> None:
    """All weights have moved, and are alike on all ranks."""
    for mine, first in zip(weights, network().parameters(), strict=True):
        assert not torch.isclose(mine, first, rtol=0, atol=1e-6).all()
        assert all(torch.equal(mine, its) for its in world.all_gather_object(mine))


@pytest.mark.parametrize(
    "rule", [LocalSGD(unisono.Exchange(wire="int8"), every=2), unisono.DiLoCo(every=2, fragments=1, delay=0)]
)
def test_weights_that_differ_before_the_first_step_meet_at_the_end_of_a_period(world: World, rule: LocalSGD) -> None:
    model = network()
    unisono.parallel(model, world, rule, optimizer := optimizer_of(model))
    with torch.no_grad():
        model[1].weight.add_(world.rank)
    for inputs, labels in batches(world, 2, 12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    assert_trained(world, [*model.parameters()])


@pytest.mark.parametrize("rule", [LocalSGD(every=2), unisono.DiLoCo(every=2, fragments=1, delay=0)])
def test_a_pass_on_padding_counts_nothing(world: World, rule: LocalSGD) -> None:
    """With 0 samples, a rank's own step is that of a rank that has left out the pass."""

    def trained_on(padding: bool) -> list[torch.Tensor]:
        model = network()
        unisono.parallel(model, world, rule, optimizer := optimizer_of(model))
        for index, (inputs, labels) in enumerate(batches(world, 4, 12)):
            empty = index > 1 and world.rank == world.size - 1
            optimizer.zero_grad()
            if padding or not empty:
                unisono.add_samples(model, 0 if empty else len(labels))
                nn.functional.cross_entropy(model(inputs.double()), labels).backward()
            assert not empty or all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        with pytest.raises(UsageError, match="leave out the empty one"):
            unisono.add_samples(model, 0)
        return [parameter.detach().clone() for parameter in model.parameters()]

    close(trained_on(padding=True), trained_on(padding=False))


@pytest.mark.parametrize(
    "rule",
    [
        LocalSGD(every=2),
        LocalSGD(unisono.Exchange(wire="int8"), every=2),
        unisono.DiLoCo(every=2, fragments=1, delay=0),
    ],
    ids=["local_sgd", "int8", "diloco"],
)
def test_steps_without_a_backward_pass_that_averages(world: World, rule: LocalSGD) -> None:
    """Anchors are what ranks have in common, from the first step on."""
    model = network()
    unisono.parallel(model, world, rule, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    for inputs, labels in batches(world, 4, 12):
        loss = nn.functional.cross_entropy(model(inputs.double()), labels)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    assert_trained(world, [*model.parameters()])


def test_a_step_that_calls_that_of_its_base_class_is_one(world: World) -> None:
    class Mine(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = network()
    torch.optim.Adam(model.parameters())  # PyTorch calls hooks in its step, too, from here on
    unisono.parallel(model, world, LocalSGD(every=16), optimizer := Mine(model.parameters()))
    for inputs, labels in batches(world, 3, 12):
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    reducer = reducer_of(model)
    assert reducer is not None
    assert reducer.programs.step == 3


def test_a_trainer_of_a_model_whose_loop_was_its_own(world: World) -> None:
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, world, LocalSGD(every=2), optimizer)
    with pytest.raises(UsageError, match=r"parallel by LocalSGD\(.*the Trainer's rule is BSP\("):
        unisono.Trainer(model, world, unisono.BSP(), optimizer)
    trainer = unisono.Trainer(model, world, LocalSGD(every=2), optimizer)
    for inputs, labels in batches(world, 5, 12):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    close([*model.parameters()], trained(world, LocalSGD(every=2), 5))


@pytest.mark.parametrize("rule", [LocalSGD(every=2), unisono.Sharded()], ids=["local_sgd", "sharded"])
def test_another_optimizer_takes_the_place_of_one(world: World, rule: LocalSGD | unisono.Sharded) -> None:
    def stepped(optimizer: torch.optim.Optimizer) -> None:
        for inputs, labels in batches(world, 4, 12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.double()), labels).backward()
            optimizer.step()
        assert_trained(world, [*model.parameters()])

    model = network()
    unisono.parallel(model, world, rule, first := torch.optim.Adam(model.parameters()))
    stepped(first)
    unisono.parallel(model, world, rule, second := optimizer_of(model))
    stepped(second)
    for other in (unisono.DiLoCo(), unisono.BSP()):
        with pytest.raises(UsageError, match="is parallel already"):
            unisono.parallel(model, world, other, optimizer_of(model))
    reducer = reducer_of(model)
    assert reducer is not None
    if isinstance(rule, LocalSGD):
        first.step()
        assert reducer.programs.step == 8, "the first one's steps no longer count"


def test_a_step_that_is_compiled_averages_weights_and_buffers(world: World) -> None:
    model: Any = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), network()).double()
    unisono.parallel(model, world, LocalSGD(every=2), optimizer := torch.optim.SGD(model.parameters(), 0.1))

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    for inputs, labels in batches(world, 4, 12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        step()
    assert_trained(world, [*model[2].parameters()])
    assert all(torch.equal(model[1].running_mean, its) for its in world.all_gather_object(model[1].running_mean))


def test_a_parameter_of_no_parallel_model_is_refused_in_the_step(world: World) -> None:
    model, weights = network(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), weights], 0.1)
    unisono.parallel(model, world, LocalSGD(every=1), optimizer)
    with pytest.raises(UsageError, match=r"the optimizer has a parameter of shape \(2,\) that is not the model's"):
        optimizer.step()
    weights.requires_grad_(False)
    optimizer.step()


def test_slips_in_the_arguments(world: World) -> None:
    model: Any = network()
    optimizer = optimizer_of(model)
    with pytest.raises(UsageError, match="was given a World and a "):
        unisono.parallel(world, model)  # type: ignore[arg-type]
    for rule, message in (
        (optimizer, "the third argument is a SGD, .*: the optimizer is the fourth argument"),
        (LocalSGD, r"the third argument is the class LocalSGD, .*: pass a rule, as in unisono.LocalSGD\(every=16\)"),
        ("local_sgd", "the third argument is a str, which is no instance of a rule"),
    ):
        with pytest.raises(UsageError, match=message):
            unisono.parallel(model, world, rule)
        with pytest.raises(UsageError, match=message):
            unisono.Trainer(model, world, rule, optimizer)
    for clip in (0, -1, float("nan")):
        with pytest.raises(UsageError, match=rf"Trainer\(clip={clip}\): the norm must be above 0, or None"):
            unisono.Trainer(model, world, unisono.BSP(), optimizer, clip=clip)
    with pytest.raises(UsageError, match="virtual_ranks = -1, but it has to be at least the number of ranks, or 0"):
        unisono.parallel(model, world, virtual_ranks=-1)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_averaging_weights_in_each_step_is_averaging_gradients(group: World, overlap: str) -> None:
    averaged = trained(group, unisono.BSP(SMALL, overlap))
    assert_trained(group, averaged)
    close(trained(group, LocalSGD(SMALL, overlap, every=1)), averaged)


def test_averaged_weights_at_k_times_the_rate_are_summed_gradients(group: World) -> None:
    summed = trained(group, unisono.BSP(SMALL, scale="sum"), decay=0.0)
    assert_trained(group, summed)
    close(trained(group, LocalSGD(SMALL, every=1), rate=0.1 * group.size, decay=0.0), summed)


@pytest.mark.parametrize("overlap", ["chain", "concurrent", "funnel"])
def test_a_rule_in_a_custom_loop(group: World, overlap: str) -> None:
    """Gradients stay this rank's; the weights are averaged at the end of the optimizer's step."""
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, group, LocalSGD(SMALL, overlap, every=3), optimizer)
    for step, (inputs, labels) in enumerate(batches(group, 9, 12)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        alike = all(
            torch.equal(weight, other)
            for mine in group.all_gather_object(weights)
            for weight, other in zip(mine, weights, strict=True)
        )
        assert alike == (group.size == 1 or step % 3 == 2)
    close(weights, trained(group, LocalSGD(SMALL, overlap, every=3), 9))


def test_a_rule_on_weights_needs_the_optimizer(group: World) -> None:
    with pytest.raises(UsageError, match=r"call unisono.parallel\(model, world, rule, optimizer\)"):
        unisono.parallel(network(), group, LocalSGD())


@pytest.mark.parametrize("rule", [unisono.BSP(), LocalSGD()])
def test_what_only_calls_an_optimizer_is_refused(world: World, rule: unisono.BSP | LocalSGD) -> None:
    class Lookahead:
        pass

    with pytest.raises(UsageError, match=r"the optimizer is a Lookahead, which is no torch.optim.Optimizer"):
        unisono.parallel(network(), world, rule, Lookahead())  # type: ignore[arg-type]


def test_an_asynchronous_rule_is_for_recipes(group: World) -> None:
    model = network()
    with pytest.raises(UsageError, match="EASGD has servers, which `unisono train` runs: name the rule in a recipe"):
        unisono.parallel(model, group, EASGD(), optimizer_of(model))


def test_an_evaluation_uses_the_mean_of_the_weights(group: World) -> None:
    model = network()
    trainer = unisono.Trainer(model, group, LocalSGD(every=100), optimizer_of(model))
    for inputs, labels in batches(group, 3, 12):
        trainer.step(inputs.double(), labels)
    trainer.wait()
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with trainer.reducer.weights.averaged():
        mean = [torch.stack(each).mean(0) for each in zip(*group.all_gather_object(own), strict=True)]
        close([parameter.detach() for parameter in model.parameters()], mean)
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))


def test_a_custom_rule_gives_the_same_bits_on_all_ranks(group: World) -> None:
    before = [parameter.detach().clone() for parameter in network().parameters()]
    weights = trained(group, Largest(SMALL, "chain"))
    assert all(not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    for mine in group.all_gather_object(weights):
        assert all(torch.equal(weight, other) for weight, other in zip(mine, weights, strict=True))


def test_a_request_is_sent_with_the_next_average(group: World) -> None:
    model = network()
    trainer = unisono.Trainer(model, group, LocalSGD(every=4), optimizer_of(model))
    heard = []
    for step, (inputs, labels) in enumerate(batches(group, 8, 12)):
        if step == 1 and group.rank == group.size - 1:
            trainer.request("save")
        trainer.step(inputs.double(), labels)
        heard.append(dict(trainer.requests()))
    trainer.wait()
    assert [bool(requests) for requests in heard] == [False, False, False, True, False, False, False, False]
    assert heard[3] == {"save": f"rank {group.size - 1}"}


def test_uneven_accumulation_while_settings_are_tried(group: World) -> None:
    """Settings are tried by steps, as periods are counted, and not by backward passes."""
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, group, LocalSGD(every=2), optimizer)
    for inputs, labels in batches(group, 40, 12):
        optimizer.zero_grad()
        for _ in range(1 + group.rank):
            nn.functional.cross_entropy(model(inputs.double()), labels).backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert all(torch.equal(rank_weights, weights) for rank_weights in group.all_gather_object(weights))


def test_an_optimizer_is_left_with_the_model(group: World) -> None:
    """Made parallel again with a layer less, the model's steps are those of the second reducer alone."""
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, group, LocalSGD(every=2), optimizer)
    first = reducer_of(model)
    optimizer.step()
    model[1].requires_grad_(requires_grad=False)
    unisono.parallel(model, group, LocalSGD(every=2), optimizer)
    optimizer.step()
    second = reducer_of(model)
    assert first is not None
    assert second is not None
    assert (first.programs.step, second.programs.step) == (1, 1)


def test_a_rank_that_leaves_out_a_step_is_told_how(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = optimizer_of(model)
    unisono.parallel(model, group, LocalSGD(every=1), optimizer)
    reducer = reducer_of(model)
    assert reducer is not None

    def fail() -> None:
        raise OperationError("agree 0 failed")

    monkeypatch.setattr(reducer.runner, "finish_step", fail)
    with pytest.raises(OperationError) as raised:
        optimizer.step()
    assert raised.value.__notes__ == [
        "LocalSGD counts the calls of optimizer.step(): a rank that has left one out is behind the others; in its "
        "place, call optimizer.zero_grad() and then optimizer.step(), which changes nothing"
    ]


def test_programs_that_the_player_does_not_support_are_refused(group: World) -> None:
    @dataclass(frozen=True)
    class Half(unisono.BSP):
        def __call__(self, event: Step, rank: int, layout: Layout) -> StepProgram:
            mine = RankGroup((rank,))
            program = super().__call__(event, rank, layout)
            return tuple(t._replace(group=mine) if t.group is not None else t for t in program)

    if group.size == 1:
        return
    model = network()
    trainer = unisono.Trainer(model, group, Half(SMALL, "chain"), optimizer_of(model))
    inputs, labels = next(batches(group, 1, 12))
    with pytest.raises(UsageError, match=r"agree 0 is of the ranks \(\d,\): over MPI a group has all"):
        trainer.step(inputs.double(), labels)
