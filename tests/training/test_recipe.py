"""Settings of a run and their differences."""

import dataclasses
from pathlib import Path

from unisono.training.recipe import RuleRecipe, differences
from unisono.training.recipe_file import read_recipe

RECIPES = Path(__file__).parents[2] / "src" / "unisono" / "recipes"
DIGITS = RECIPES / "digits.toml"
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def test_how_gradients_meet_is_found_by_measuring_unless_it_is_said() -> None:
    recipe = read_recipe(DIGITS)
    assert (recipe.rule.overlap, recipe.exchange.bucket_megabytes, recipe.optimizer.clip) == ("auto", 0, 0)
    reported = read_recipe(
        DIGITS,
        ["rule.overlap=none", "exchange.bucket_megabytes=0.25", "optimizer.clip=5", "optimizer.momentum=0"],
    )
    assert (reported.rule.overlap, reported.exchange.bucket_megabytes, reported.optimizer.clip) == ("none", 0.25, 5)
    assert read_recipe(DIGITS, ["exchange.bucket_megabytes=0", "optimizer.clip=0"]) == recipe


def test_differences_name_the_keys_but_not_the_ranks() -> None:
    other = read_recipe(DIGITS, ["training.epochs=3", "name=other", "ranks=4"])
    assert differences(read_recipe(DIGITS), other) == ["name", "training.epochs"]


def test_the_overlaps_are_those_of_step_programs() -> None:
    from unisono.step.overlaps import OVERLAPS

    for name in OVERLAPS:
        assert read_recipe(DIGITS, [f"rule.overlap={name}"]).rule.overlap == name
    choices = next(one for one in dataclasses.fields(RuleRecipe) if one.name == "overlap").metadata["one_of"]
    assert sorted(choices) == sorted(["auto", *OVERLAPS])
