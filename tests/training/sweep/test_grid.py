from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import RecipeError
from unisono.training.recipe import find_recipe
from unisono.training.sweep.grid import MAX_NAME_CHARACTERS, Grid, parse_grid, read_recipes

DIGITS = find_recipe(Path("digits"))

values = st.text("abcXYZ019._-+:/é ", min_size=1, max_size=40).map(str.strip).filter(bool)
keys = st.from_regex(r"[a-z_]{1,9}(\.[a-z_]{1,9})?", fullmatch=True)
axes = st.lists(values, min_size=1, max_size=4, unique=True).map(tuple)
grids = (
    st.dictionaries(keys, axes, min_size=1, max_size=4)
    .filter(lambda several: any(len(values) > 1 for values in several.values()))
    .map(Grid)
)


@given(grids)
def test_the_grid_is_the_product_of_its_axes_in_order(grid: Grid) -> None:
    points = grid.points()
    assert len(points) == math.prod(map(len, grid.axes.values()))
    assert [point.changes for point in points] == [
        tuple(f"{key}={value}" for key, value in zip(grid.axes, values, strict=True))
        for values in itertools.product(*grid.axes.values())
    ]
    assert [point.values for point in points] == list(itertools.product(*grid.swept.values()))


@given(grids)
def test_names_are_unique_folders_that_sort_in_order(grid: Grid) -> None:
    names = [point.name for point in grid.points()]
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=lambda name: name.partition("-")[0])
    assert len({name.partition("-")[0] for name in names}) == len(names)
    assert all(re.fullmatch(r"\d+-[A-Za-z0-9_.=+-]+", name) for name in names)
    assert all(len(name) <= MAX_NAME_CHARACTERS for name in names)


@given(grids)
def test_a_grid_is_read_from_the_options_that_describe_it(grid: Grid) -> None:
    read = parse_grid([f"{key} = {' , '.join(values)}" for key, values in grid.axes.items()])
    assert list(read.axes.items()) == list(grid.axes.items())


def test_names_have_the_swept_keys_only() -> None:
    grid = parse_grid(["rule.every=1,4", "training.epochs=3", "optimizer.learning_rate=0.05,0.1"])
    assert [point.name for point in grid.points()] == [
        "1-every=1-learning_rate=0.05",
        "2-every=1-learning_rate=0.1",
        "3-every=4-learning_rate=0.05",
        "4-every=4-learning_rate=0.1",
    ]
    assert grid.points()[2].label == "every=4, learning_rate=0.05"
    assert grid.points()[2].changes == ("rule.every=4", "training.epochs=3", "optimizer.learning_rate=0.05")


def test_keys_with_the_same_end_are_named_whole() -> None:
    grid = parse_grid(["rule.every=1,4", "optimizer.every=0.5,2", "training.seed=0,1"])
    assert grid.points()[0].label == "rule.every=1, optimizer.every=0.5, seed=0"


def test_a_key_of_an_older_recipe_gets_its_current_name() -> None:
    assert list(parse_grid(["exchange.embedding=chain,funnel"]).swept) == ["rule.overlap"]
    with pytest.raises(RecipeError, match=r"rule\.overlap is set twice"):
        parse_grid(["exchange.embedding=chain,funnel", "rule.overlap=none"])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([], "nothing to sweep"),
        (["training.epochs=3"], "nothing to sweep"),
        (["rule.every"], "--set rule.every: not of the form key=a,b,c"),
        (["=1,2"], "--set =1,2: not of the form"),
        (["rule.every=1,,2"], "--set rule.every=1,,2: a value is empty"),
        (["rule.every="], "--set rule.every=: a value is empty"),
        (["rule.every=1,2,1"], "the value 1 is there twice"),
        (["rule.every=1,2", "rule.every=4"], "--set rule.every=4: rule.every is set twice"),
        (['name="a,b"'], "a swept value cannot contain a comma"),
        (["rule.every=[1,2]"], "a swept value cannot contain a comma"),
    ],
)
def test_a_bad_option_is_named(changes: list[str], error: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(error)):
        parse_grid(changes)


def test_each_point_has_its_recipe() -> None:
    grid = parse_grid(["rule.every=1,4", "training.epochs=3", 'data.pack=""'])
    recipes = read_recipes(DIGITS, grid, ranks=3)
    assert [(recipe.rule.options["every"], recipe.training.epochs, recipe.ranks) for recipe in recipes.values()] == [
        (1, 3, 3),
        (4, 3, 3),
    ]
    assert list(recipes) == [point.name for point in grid.points()]


@pytest.mark.parametrize(
    ("changes", "ranks", "error"),
    [
        (["rule.evry=1,4"], None, "unknown key rule.evry; did you mean rule.every?"),
        (["rule.every=1,4,x"], None, "rule.every = 'x' is not a whole number"),
        (["rule.every=4,0"], None, "rule.every = 0, but it has to be at least 1"),
        (["rule.name=bsp,best"], None, "rule.name = 'best'; there are"),
        (["training.batch=64,1"], 2, "2 ranks share batches of 1 samples"),
        (["ranks=1,2"], 2, "--ranks 2, but --set gives ranks too"),
        (["optimizer.learning_rate=0.1,0.10"], None, "learning_rate=0.1 and learning_rate=0.10 are the same run"),
    ],
)
def test_a_point_that_cannot_be_run_is_named(changes: list[str], ranks: int | None, error: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(error)):
        read_recipes(DIGITS, parse_grid(changes), ranks)


def test_a_network_of_ones_own_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("def one(classes, channels): ...\n")
    (tmp_path / "mine.toml").write_text(DIGITS.read_text())
    recipes = read_recipes(tmp_path / "mine.toml", parse_grid(["model.name=small_convnet,nets:one"]))
    assert [recipe.model.folder for recipe in recipes.values()] == ["", str(tmp_path)]
