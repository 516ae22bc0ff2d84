"""What a recipe asks for, made: the plan of its convolutions. The rest needs ranks: tests/mpi/test_run.py."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.compute.algorithms import DEFAULT
from unisono.compute.convolution_plan import ConvolutionPlan, machine, read_plan, write_plan
from unisono.errors import RecipeError, UsageError
from unisono.models import make_network
from unisono.processor_model import processor
from unisono.rules import BSP, Exchange, LocalSGD
from unisono.training.build import check_fit, load_plan, make_rule, save_plan
from unisono.training.recipe import ExchangeRecipe, Recipe, RuleRecipe
from unisono.training.recipe_file import parse_recipe

HERE = machine(processor().name)


class Alone:
    """A world of one rank."""

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


WORLD: Any = Alone()


def recipe(shared: Path | None = None) -> Recipe:
    return parse_recipe({"compute": {"plan": str(shared)}} if shared else {}, "test")


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


def test_a_rule_of_ones_own_is_made_by_its_function(tmp_path: Path) -> None:
    (tmp_path / "own_rule_made.py").write_text(
        "from unisono.rules import BSP\n"
        "def largest(exchange, overlap):\n    return BSP(exchange, overlap, 3)\n"
        "def none(exchange, overlap):\n    return 7\n"
    )
    options = RuleRecipe("own_rule_made:largest", str(tmp_path), "funnel")
    recipe = Recipe(rule=options, exchange=ExchangeRecipe(wire="float16"))
    assert make_rule(recipe) == BSP(Exchange(wire="float16"), "funnel", 3)
    with pytest.raises(RecipeError, match="'own_rule_made:none': it gave int, not a rule that inherits from"):
        make_rule(replace(recipe, rule=replace(options, name="own_rule_made:none")))
    assert make_rule(Recipe(rule=RuleRecipe("local_sgd", every=5))) == LocalSGD(every=5)
