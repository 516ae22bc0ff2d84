"""What a recipe asks for, made: the plan of its convolutions. The rest needs ranks: tests/mpi/test_run.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.compute.convolution_plan import ConvolutionPlan, machine, read_plan, write_plan
from unisono.compute.processor import processor
from unisono.compute.ways.table import OWN
from unisono.errors import UsageError
from unisono.training.making import keep_plan, known_plan
from unisono.training.recipe import Recipe, parse_recipe

HERE = machine(processor().name)


class Alone:
    """A world of one rank."""

    def on_root(self, function: Callable[[], Any]) -> Any:
        return function()


WORLD: Any = Alone()


def recipe(shared: Path | None = None) -> Recipe:
    return parse_recipe({"compute": {"plan": str(shared)}} if shared else {}, "test")


def test_a_new_run_knows_nothing() -> None:
    assert known_plan(recipe(), None, WORLD) == ConvolutionPlan()


def test_a_run_that_goes_on_computes_as_it_began(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "shared.json"
    write_plan(own, HERE, {"a": {OWN: 1.0}})
    write_plan(shared, HERE, {"b": {OWN: 1.0}})
    found = known_plan(recipe(shared), own, WORLD)
    assert found.measured == {"a": {OWN: 1.0}}
    assert found.settled


def test_what_several_runs_share_is_taken_up_and_added_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    write_plan(shared, HERE, {"b": {OWN: 1.0}})
    found = known_plan(recipe(shared), tmp_path / "none.json", WORLD)
    assert found.measured == {"b": {OWN: 1.0}}
    assert not found.settled


def test_a_plan_of_another_machine_is_made_anew(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    write_plan(own, {**HERE, "threads": -1}, {"a": {OWN: 1.0}})
    assert known_plan(recipe(), own, WORLD) == ConvolutionPlan()


def test_it_is_kept_with_the_run_and_for_others(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "deep" / "shared.json"
    keep_plan(recipe(shared), own, ConvolutionPlan({"a": {OWN: 1.0}}), WORLD)
    assert read_plan(own, HERE) == read_plan(shared, HERE) == {"a": {OWN: 1.0}}


def test_nothing_tried_is_not_kept(tmp_path: Path) -> None:
    keep_plan(recipe(), tmp_path / "own.json", ConvolutionPlan(), WORLD)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/plan.json"):
        keep_plan(recipe(), tmp_path / "file" / "plan.json", ConvolutionPlan({"a": {OWN: 1.0}}), WORLD)
