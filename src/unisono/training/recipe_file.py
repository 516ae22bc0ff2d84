"""Reading of recipes from TOML: those of files, also of older releases, and by name those that come with the package.

Needs neither PyTorch nor MPI.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import RecipeError
from unisono.rules import all_options
from unisono.tables import change, parse
from unisono.training.recipe import Recipe, RuleRecipe
from unisono.user_function import is_user_function

FOLDER = Path(__file__).parents[1] / "recipes"

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
    recipe = parse_recipe(kind, content, str(path), changes)
    for table in ("model", "rule"):
        if is_user_function((found := getattr(recipe, table)).name):
            beside = (
                Path.cwd() if path.resolve().parent == FOLDER else path.parent
            )  # nobody's code is beside packaged recipes
            folder = (beside / found.folder).resolve()
            recipe = replace(recipe, **{table: replace(found, folder=str(folder))})
    return recipe


def parse_recipe(
    kind: type[AnyRecipe], content: Mapping[str, Any], source: str, changes: Sequence[str] = ()
) -> AnyRecipe:
    """Return the recipe of this kind in the tables of `source`, with `changes` of the form key=value applied."""
    tables = dict(renamed(content))
    for wanted in changes:  # one after another, each checked by itself: its error names it
        alone: dict[str, Any] = {}
        for found in (tables, alone):
            change(found, renamed_change(wanted))
        _parse(kind, renamed(alone), f"--set {wanted}")
    return _parse(kind, renamed(tables), source)


def _parse(kind: type[AnyRecipe], tables: Mapping[str, Any], source: str) -> AnyRecipe:
    """Return the recipe in tables of current names. The options of its rule are those that the rules' classes have."""
    rule = tables.get("rule", {})
    if not isinstance(rule, Mapping):
        return parse(kind, tables, source)  # an error
    recipe = parse(kind, {name: table for name, table in tables.items() if name != "rule"}, source)
    return replace(recipe, rule=_parse_rule(rule, source))


def _parse_rule(table: Mapping[str, Any], source: str) -> RuleRecipe:
    """Return the rule of a recipe; its options are keys of the table itself, or of its table `options`."""
    given = {key: value for key, value in table.items() if key != "options"}
    options = table.get("options", {})
    if not isinstance(options, Mapping):
        raise RecipeError(f"{source}: rule.options is a table of keys, not the value {options!r}")
    if given.get("every") == "auto":
        raise RecipeError(
            f'{source}: rule.every = "auto" was measured by an older release; give a number: --set rule.every=16'
        )
    plain = {one.name: one for one in fields(RuleRecipe) if one.name != "options"}
    known = {**plain, **all_options(str(given.get("name", RuleRecipe.name)))}
    columns = [
        (one.name, type(one.default), field(default=one.default, metadata=one.metadata)) for one in known.values()
    ]
    found = dict(vars(parse(make_dataclass("Rule", columns), {**options, **given}, source, name="rule")))
    name, folder, overlap = (found.pop(key) for key in plain)
    return RuleRecipe(name, folder, overlap, found)


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
    name = name.removeprefix("options.") if table == "rule" else name
    return f"{'.'.join(RENAMED.get((table, name), (table, name)))}{equals}{value}" if name else wanted


def names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe: `path` if it is one, else the package's recipe of that name.

    Raises RecipeError, with the nearest name or all of them, for a bare name that is neither.
    """
    if path.is_file() or path.suffix or path.parent != Path():
        return path
    packaged = FOLDER / f"{path}.toml"
    if not packaged.exists():
        near = difflib.get_close_matches(str(path), names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is neither a file nor one of {', '.join(names())}"
        raise RecipeError(f"no recipe {path}: {hint}")
    return packaged
