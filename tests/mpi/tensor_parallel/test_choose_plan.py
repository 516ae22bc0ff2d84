"""A plan by prediction is the same on all ranks, and training with it is data parallelism's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, SAMPLES, Case, alone, batch, model_of, train
from torch import nn

import unisono
from unisono.errors import UsageError
from unisono.plan.timing import StepSeconds
from unisono.plan.trace import Trace
from unisono.reducer import reducer_of
from unisono.schedules.pieces import bounds
from unisono.step.costs import Cost
from unisono.tensor_parallel import choose_plan as chooser
from unisono.tensor_parallel.choose_plan import choose_plan, measure_beside, measure_links, seconds_of_call
from unisono.tensor_parallel.model import seed_dropout, split_of
from unisono.world import World

SLOW, FAST = Cost(0.0, 1.0), Cost(0.0, 0.0)
"""A byte a second, and any number of them in none."""


def example_of(name: str, group: World) -> torch.Tensor:
    first, last = bounds(SAMPLES, group.size, group.rank)
    return batch(CASES[name], 0)[0][first:last]


def use_cost(monkeypatch: pytest.MonkeyPatch, cost: Cost) -> None:
    """Let all collectives cost this, wherever they are, and computing take as long in groups and beside exchanges: of
    such small layers the call is what any number of samples takes."""
    measured = chooser.time_layers

    def time_layers(*arguments: Any) -> tuple[Trace, torch.Tensor]:
        traced, seconds = measured(*arguments)
        return traced, seconds * torch.tensor([1.0, 1.0, 0.0, 0.0])

    monkeypatch.setattr(chooser, "time_layers", time_layers)
    monkeypatch.setattr(chooser, "fit", lambda *_: cost)
    monkeypatch.setattr(chooser, "seconds_of_call", lambda *_: 0.0)
    monkeypatch.setattr(chooser, "measure_beside", lambda *_: 1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_training_with_the_chosen_plan_is_data_parallel_training(
    group: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a slow link layers are split, on a fast one none; all ranks have the same plan, and the losses are equal."""
    expected, _ = alone(CASES[name], 3)
    for cost in (SLOW, FAST):
        use_cost(monkeypatch, cost)
        model = model_of(CASES[name])
        choice = choose_plan(model, group, example_of(name, group))
        assert choice.plan is not None
        assert len(set(group.all_gather_object(str(choice.plan)))) == 1
        if cost is FAST or group.size == 1:
            assert not choice.plan
        elif name == "mlp":  # more weights than activations of 12 samples
            assert choice.plan
        model = unisono.parallel(model, group, plan=choice.plan)
        assert train(model, sgd(model), CASES[name], group, range(3)) == pytest.approx(expected, rel=1e-9)


def test_pairs_are_chosen_where_they_can_be(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, SLOW)
    plan = choose_plan(model_of(CASES["mlp"]), group, example_of("mlp", group)).plan
    if group.size > 1:
        splits = [str(split) for split in plan.values()]
        assert any("gives part" in split for split in splits)
        assert any("takes part" in split for split in splits)


def test_auto_measures_and_says_what_was_chosen(group: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono")
    expected, _ = alone(CASES["words"], 4)
    model = unisono.parallel(model_of(CASES["words"]), group, plan="auto", example=example_of("words", group))
    assert train(model, sgd(model), CASES["words"], group, range(4)) == pytest.approx(expected, rel=1e-9)
    lines = [message for message in caplog.messages if "split by prediction" in message]
    assert len(lines) == (group.rank == 0)


@pytest.mark.parametrize("cost", [SLOW, FAST], ids=["slow link", "fast link"])
def test_a_loop_whose_layers_are_split_is_warned(
    group: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cost: Cost
) -> None:
    use_cost(monkeypatch, cost)
    model = unisono.parallel(model_of(CASES["mlp"]), group, plan="auto", example=example_of("mlp", group))
    splits = cost is SLOW and group.size > 1
    assert (split_of(model) is not None) == splits
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (splits and group.rank == 0)
    for line in warnings:
        assert all(name in line for name in ("equally often", "clip_grad_norm", "seed_dropout"))
        assert "\n" not in line


@pytest.mark.parametrize("cost", [SLOW, FAST], ids=["slow link", "fast link"])
def test_layers_of_a_device_are_timed_there_and_trained_as_on_the_host(
    world: World, device: torch.device, monkeypatch: pytest.MonkeyPatch, cost: Cost
) -> None:
    use_cost(monkeypatch, cost)
    numbers = torch.Generator().manual_seed(world.rank)
    inputs, labels = torch.randn(2, 12, generator=numbers, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    weights, splits = list[list[torch.Tensor]](), list[bool]()
    for place in (torch.device("cpu"), device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Linear(12, 12)).double().to(place)
        before = torch.get_rng_state()
        unisono.parallel(model, world, plan="auto", example=inputs.to(place))
        assert torch.equal(torch.get_rng_state(), before)
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.to(place)), labels.to(place)).backward()
            optimizer.step()
        splits.append(split_of(model) is not None)
        weights.append([tensor.cpu() for tensor in model.state_dict().values()])
    assert splits == [cost is SLOW and world.size > 1] * 2
    for here, there in zip(*weights, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)


def test_a_plan_that_splits_nothing_does_not_count(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as without a plan: its dropouts stay, and once it has changed any plan or rule is accepted."""
    use_cost(monkeypatch, FAST)
    model, example = model_of(CASES["mlp"]), example_of("mlp", group)
    assert isinstance(model, nn.Sequential)
    unisono.parallel(model, group, plan="auto", example=example)
    assert split_of(model) is None
    assert type(model[2]) is nn.Dropout
    seed_dropout(model, 7, 0)
    assert type(model[2]) is nn.Dropout
    model.append(nn.Linear(5, 5).double())
    unisono.parallel(model, group, plan="auto", example=example)
    model.append(nn.Linear(5, 5).double())
    unisono.parallel(model, group, unisono.LocalSGD(), sgd(model))
    assert reducer_of(model) is not None


class Tied(nn.Module):
    """Embedding whose weight a function reads as the output layer's, larger than the activations of 12 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(400, 12), nn.Linear(12, 24)
        self.back = nn.Linear(24, 12)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        y = self.back(torch.tanh(self.hidden(self.words(numbers))))
        return nn.functional.linear(y.mean(1), self.words.weight)


def test_a_weight_that_a_function_reads_stays_whole(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, SLOW)
    case = Case(Tied, {}, CASES["words"].inputs)
    expected, _ = alone(case, 4)
    first, last = bounds(SAMPLES, group.size, group.rank)
    model = model_of(case)
    plan = choose_plan(model, group, batch(case, 0)[0][first:last]).plan
    assert plan is not None
    assert "words" not in plan
    model = unisono.parallel(model, group, plan=plan)
    assert train(model, sgd(model), case, group, range(4)) == pytest.approx(expected, rel=1e-9)


class Experts(nn.Module):
    """Common layer, and experts that are called for the samples of their own alone."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.experts = nn.Linear(12, 12), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, numbers = self.common(x), x[:, 0].long()
        for expert in numbers.unique().tolist():
            y = y.index_put((numbers == expert,), self.experts[expert](y[numbers == expert]))
        return y


def test_layers_that_some_rank_does_not_call_stay_whole(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cost(monkeypatch, SLOW)
    example = torch.zeros(1, 12)  # whose activations are few beside the weights
    example[:, 0] = group.rank  # each rank calls the expert of its number
    plan = choose_plan(Experts(), group, example).plan
    assert plan is not None
    assert set(plan) == ({"common"} if group.size > 1 else set())
    assert len(set(group.all_gather_object(str(plan)))) == 1


def test_the_cost_of_the_link_is_the_same_on_all_ranks(group: World) -> None:
    if group.size > 1:
        links = measure_links(group, torch.device("cpu"), lambda call: call() or 2.0)  # a second longer, at least
        assert links.network.gradients.per_byte > 0
        assert links.network.waits > 1.0
        assert len(set(group.all_gather_object(links.network.gradients))) == 1


def test_what_a_call_adds_is_counted_behind_each_layer_on_the_slowest_rank(group: World) -> None:
    modules, calls = [nn.Identity() for _ in range(3)], list[int]()

    def steps(begin: Callable[[], None]) -> list[StepSeconds]:
        begin()
        for module in modules:
            module(torch.ones(1))
        return [StepSeconds(1.0 + 0.5 * (group.rank + 1) * len(calls), 0.0, 0.0, 0.0)]

    assert seconds_of_call(modules, steps, 1.0, group, lambda: calls.append(0)) == 0.5 * group.size
    assert seconds_of_call(modules[:1], steps, 9.0, group, int) == 0  # shorter than alone, by chance
    assert not any(module._forward_hooks for module in modules)


def test_the_rate_of_what_runs_at_once_is_the_same_on_all_ranks(group: World) -> None:
    def steps(begin: Callable[[], None]) -> list[object]:
        for _ in range(4):
            begin()
        return []

    if group.size > 1:
        rates = [measure_beside(steps, 1e-3, Cost(1e-4, per_byte), group) for per_byte in (1e-9, 1e-3)]
        assert all(0 < rate <= 1 for rate in rates)
        assert set(group.all_gather_object(tuple(rates))) == {tuple(rates)}


def test_rules_and_optimizers_that_need_whole_weights_split_nothing(
    group: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unisono")
    model, example = model_of(CASES["mlp"]), example_of("mlp", group)
    unisono.parallel(model, group, None, torch.optim.Adafactor(model.parameters()), plan="auto", example=example)
    assert split_of(model) is None
    local = model_of(CASES["mlp"])
    unisono.parallel(local, group, unisono.LocalSGD(), sgd(local), plan="auto", example=example)
    assert split_of(local) is None
    assert reducer_of(local) is not None
    if group.rank == 0:
        said = " ".join(caplog.messages)
        assert "none, Adafactor needs whole weights" in said
        assert "none, LocalSGD does not take split layers" in said


def test_an_example_is_needed_and_for_nothing_else(group: World) -> None:
    model = model_of(CASES["mlp"])
    with pytest.raises(UsageError, match='plan="auto" needs example=inputs'):
        unisono.parallel(model, group, plan="auto")
    with pytest.raises(UsageError, match="no other plan takes one"):
        unisono.parallel(model, group, plan={"0": "column"}, example=example_of("mlp", group))
    assert reducer_of(model) is None


def test_seconds_add_up_to_whole_steps_of_the_slowest_rank(group: World) -> None:
    """Rank r is disturbed in the trace of layer r: all layers have the same share of a step without hooks."""
    traced = torch.ones(group.size, 4, dtype=torch.float64)
    traced[group.rank] += 1
    traced[:, 2] /= 4
    traced[:, 3] = torch.tensor([8.0] + [-1.0] * (group.size - 1))  # by chance
    steps = [StepSeconds(1.0, 2.0 + group.rank, 0.125, 0.25)] * 3
    seconds, after = chooser.of_slowest_rank(traced, steps, group)
    assert seconds[:, :3].sum(0).tolist() == pytest.approx([1.0, 1.0 + group.size, 0.25])
    assert seconds[:, :3].std(0, correction=0).tolist() == pytest.approx([0.0] * 3)
    assert seconds[:, 3].tolist() == [seconds[0, 1].item()] + [0.0] * (group.size - 1)
    assert after == (1.0, 1.0 + group.size, 0.125, 0.25)
    assert not chooser.of_slowest_rank(torch.zeros(2, 4, dtype=torch.float64), steps, group)[0].any()
