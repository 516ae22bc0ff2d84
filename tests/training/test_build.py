"""What a recipe asks for, made: the plan of its convolutions. The rest needs ranks: tests/mpi/test_run.py."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono.compute import convolution_plan
from unisono.compute.algorithms import DEFAULT
from unisono.compute.convolution_plan import ConvolutionPlan, machine, read_plan, write_plan
from unisono.compute.prepare import prepare
from unisono.errors import RecipeError, UsageError
from unisono.models import make_network
from unisono.processor import processor
from unisono.training.build import check_fit, load_plan, save_plan, warm_up
from unisono.training.recipe import Recipe, parse_recipe

HERE = machine(processor().name)


class Alone:
    """A world of one rank."""

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


WORLD: Any = Alone()


def recipe(shared: Path | None = None) -> Recipe:
    return parse_recipe(Recipe, {"compute": {"plan": str(shared)}} if shared else {}, "test")


def test_a_new_run_knows_nothing() -> None:
    assert load_plan(recipe(), None, WORLD) == ConvolutionPlan()


def test_a_resumed_run_computes_as_it_began(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "shared.json"
    write_plan(own, HERE, {"a": {DEFAULT: 1.0}})
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    found = load_plan(recipe(shared), own, WORLD)
    assert found.measured == {"a": {DEFAULT: 1.0}}
    assert not found.frozen, "layers that have become others are tried"


def test_what_several_runs_share_is_taken_up_and_added_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    found = load_plan(recipe(shared), tmp_path / "none.json", WORLD)
    assert found.measured == {"b": {DEFAULT: 1.0}}
    assert not found.frozen


def test_a_plan_of_another_machine_is_made_anew(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    write_plan(own, {**HERE, "threads": -1}, {"a": {DEFAULT: 1.0}})
    assert load_plan(recipe(), own, WORLD) == ConvolutionPlan()


def test_it_is_kept_with_the_run_and_for_others(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "deep" / "shared.json"
    save_plan(recipe(shared), own, ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)
    assert read_plan(own, HERE) == read_plan(shared, HERE) == {"a": {DEFAULT: 1.0}}


def test_timings_of_other_runs_stay(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "shared.json"
    elsewhere = {**HERE, "threads": -1}
    write_plan(shared, elsewhere, {"a": {DEFAULT: 2.0}})
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    save_plan(recipe(shared), own, ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)
    assert read_plan(own, HERE) == {"a": {DEFAULT: 1.0}}
    assert read_plan(shared, HERE) == {"a": {DEFAULT: 1.0}, "b": {DEFAULT: 1.0}}
    assert read_plan(shared, elsewhere) == {"a": {DEFAULT: 2.0}}


def test_a_plan_without_timings_is_not_written(tmp_path: Path) -> None:
    save_plan(recipe(), tmp_path / "own.json", ConvolutionPlan(), WORLD)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/plan.json"):
        save_plan(recipe(), tmp_path / "file" / "plan.json", ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)


def test_a_plan_that_could_not_be_written_is_reported_before_any_timing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the plan .*: Is a directory"):
        load_plan(recipe(tmp_path), None, WORLD)
    assert list(tmp_path.parent.glob("*.partial")) == []


@pytest.mark.parametrize(("name", "shape"), [("small_convnet", (1, 1, 32, 32)), ("cd_dnn", (1, 1, 8, 8))])
def test_a_network_that_does_not_take_the_data_is_reported(name: str, shape: tuple[int, ...]) -> None:
    model = make_network(name, "", 10, shape[1])
    with pytest.raises(RecipeError, match=rf"'{name}' does not take samples of {' x '.join(map(str, shape[1:]))}"):
        check_fit(model, name, torch.zeros(shape), nullcontext)


def test_a_network_that_takes_the_data_and_one_of_ones_own() -> None:
    check_fit(make_network("small_convnet", "", 10, 1), "small_convnet", torch.zeros(1, 1, 8, 8), nullcontext)
    check_fit(torch.nn.Linear(3, 4), "nets:mine", torch.zeros(1, 5), nullcontext)


class Others:
    """A world with a second rank, that has measured this."""

    def __init__(self, measured: dict[str, dict[str, float]]) -> None:
        self._measured = measured

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self._measured]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world: Any = Others({})
    warm_up(model, torch.zeros(2, 3, 6, 6), plan, world, nullcontext)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.frozen
    assert len(plan.measured) == 2  # forward and the weight's gradient: nobody asks for that of the inputs


def test_all_ranks_choose_the_same_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    others = {"a": {DEFAULT: 1.0}}
    world: Any = Others(others)
    warm_up(model, torch.zeros(0, 3, 6, 6), plan, world, nullcontext)
    assert plan.measured == others
