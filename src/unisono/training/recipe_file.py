"""Reading of recipes from TOML, also of those of older releases. Needs neither PyTorch nor MPI."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import RecipeError
from unisono.training.keys import change, parse
from unisono.training.packaged_recipes import FOLDER
from unisono.training.recipe import Recipe
from unisono.user_function import is_user_function

RENAMED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("exchange", "embedding"): ("rule", "overlap"),
    ("data", "hold"): ("data", "storage"),
}
"""Tables and keys of older recipes, and their current names."""

RENAMED_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("data", "storage"): {"even": "partitioned", "whole": "replicated"},
    ("compute", "convolutions"): {"tried": "autotune"},
}
"""Values of older recipes, and their current names."""


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a file, with `changes` of the form key=value (`training.epochs=3`) applied, as `read_as`."""
    return read_as(Recipe, path, changes)


def read_as(kind: type[AnyRecipe], path: Path, changes: Sequence[str] = ()) -> AnyRecipe:
    """Return the recipe of this kind in a file, with `changes` applied.

    The folder of a network or rule of your own becomes an absolute path, so that a resumed run finds it again.
    Raises RecipeError naming the file or the change, the key, and for an unknown key the nearest one.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    recipe = changed_recipe(kind, content, str(path), changes)
    for table in ("model", "rule"):
        if is_user_function((found := getattr(recipe, table)).name):
            beside = (
                Path.cwd() if path.resolve().parent == FOLDER else path.parent
            )  # nobody's code is beside packaged recipes
            folder = (beside / found.folder).resolve()
            recipe = replace(recipe, **{table: replace(found, folder=str(folder))})
    return recipe


def changed_recipe(kind: type[AnyRecipe], content: dict[str, Any], source: str, changes: Sequence[str]) -> AnyRecipe:
    """Return the recipe of this kind in the tables of `source`, with `changes` applied, also to the tables."""
    recipe = parse(kind, renamed(content), source)
    for wanted in changes:
        change(content, renamed_change(wanted))
        recipe = parse(kind, renamed(content), f"--set {wanted}")
    return recipe


def parse_recipe(content: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe in a parsed TOML file; `source` names the file in errors."""
    return parse(Recipe, renamed(content), source)


def renamed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables with keys and values of older recipes replaced by their current names."""
    found = dict(content)
    for (table, key), (new_table, new_key) in RENAMED.items():
        old = found.get(table)
        if isinstance(old, dict) and key in old and isinstance(found.get(new_table, {}), dict):
            found[table] = {name: value for name, value in old.items() if name != key}
            found[new_table] = {new_key: old[key], **found.get(new_table, {})}
    for (table, key), values in RENAMED_VALUES.items():
        value = found[table].get(key) if isinstance(found.get(table), dict) else None
        if isinstance(value, str) and value in values:
            found[table] = {**found[table], key: values[value]}
    return found


def renamed_change(wanted: str) -> str:
    """Return a change of the form key=value under the key's current name."""
    key, equals, value = wanted.partition("=")
    table, _, name = key.strip().partition(".")
    return f"{'.'.join(RENAMED.get((table, name), (table, name)))}{equals}{value}" if name else wanted
