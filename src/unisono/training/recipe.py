"""Recipes: a run as a small frozen value, read from TOML. Nothing here needs PyTorch or MPI."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from unisono.data.catalogue import SAMPLES, samples_of
from unisono.data.pictures.view import AUGMENTS
from unisono.errors import RecipeError
from unisono.models.catalogue import NETWORKS
from unisono.schedules import check

OWN = "own"
"""The wire that leaves gradients as they are."""

WIRES = (OWN, "float32", "float16", "bfloat16")

LARGEST = (1 << 63) - 1


def _number(default: float, above: float | None = None, at_least: float | None = None) -> Any:
    return field(default=default, metadata={"above": above, "at_least": at_least})


def _choice(default: str, *names: str) -> Any:
    return field(default=default, metadata={"one_of": names})


@dataclass(frozen=True)
class DataRecipe:
    """What is trained on."""

    name: str = "digits"
    pack: str = ""
    """The folder of a packed data set, with train/ and test/; else the data set that `name` says."""
    hold: str = _choice("even", "even", "whole")
    """Each rank a share of the pack, or each node a copy that its ranks share."""
    groups: int = _number(1, at_least=1)
    """Copies that the ranks hold together, each group of ranks one, where each has a share."""
    size: int = _number(0, at_least=0)
    """Pixels across of what the network is shown; 0: as raw pictures are."""
    augment: str = _choice("none", *AUGMENTS)
    """What is changed at random in training."""
    threads: int = _number(0, at_least=0)
    """That decode pictures, in each rank; 0: the rank's fair share of the cores."""


@dataclass(frozen=True)
class ModelRecipe:
    """The network."""

    name: str = "small_convnet"
    dtype: str = _choice("float32", "float32", "float64")


@dataclass(frozen=True)
class OptimizerRecipe:
    """Stochastic gradient descent with momentum."""

    learning_rate: float = _number(0.05, above=0)
    momentum: float = _number(0.9, at_least=0)
    weight_decay: float = _number(0.0, at_least=0)
    clip: float = _number(0.0, at_least=0)
    """The norm that all gradients together have at most; 0: any."""


@dataclass(frozen=True)
class TrainingRecipe:
    """How long, in which batches, from which seed."""

    epochs: int = _number(10, at_least=1)
    batch: int = _number(64, at_least=1)
    """Samples of a step, over all ranks together."""
    seed: int = _number(0, at_least=0)
    checkpoint_every: int = _number(0, at_least=0)
    """Steps between two checkpoints; 0: one at the end of each epoch alone."""


@dataclass(frozen=True)
class ExchangeRecipe:
    """How gradients meet."""

    algorithm: str = "auto"
    wire: str = OWN
    """The number format between nodes."""
    bucket_megabytes: float = _number(0, at_least=0)
    """The largest bucket; 0: what the first steps show to be best."""
    embedding: str = _choice("auto", "auto", "chain", "concurrent", "funnel", "none")
    """Where the exchange sits in the step."""


@dataclass(frozen=True)
class Recipe:
    """A run."""

    name: str = "run"
    ranks: int = _number(1, at_least=1)
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    exchange: ExchangeRecipe = field(default_factory=ExchangeRecipe)


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `changes` of the form key=value (`training.epochs=3`) made to it.

    Raises RecipeError naming the file or the change, the key, and the nearest key where there is no such one.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    recipe = parse_recipe(content, str(path))
    for change in changes:
        _change(content, change)
        recipe = parse_recipe(content, f"--set {change}")
    return recipe


def parse_recipe(content: Mapping[str, Any], source: str) -> Recipe:
    """The recipe that a parsed TOML file holds; `source` names it in errors."""
    parsed = _parse(Recipe, content, "", source)
    assert isinstance(parsed, Recipe)
    return parsed


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise RecipeError when `ranks` ranks cannot carry the recipe out: known before any of them is started."""
    data, batch, algorithm = recipe.data.name, recipe.training.batch, recipe.exchange.algorithm
    if data not in SAMPLES and not recipe.data.pack:
        raise RecipeError(f"data.name = {data!r}; there are {', '.join(SAMPLES)}")
    if recipe.model.name not in NETWORKS:
        raise RecipeError(f"model.name = {recipe.model.name!r}; there are {', '.join(NETWORKS)}")
    if recipe.data.hold == "whole" and recipe.data.groups > 1:
        raise RecipeError(
            f'data.groups = {recipe.data.groups}, but with data.hold = "whole" each node has a copy; leave groups away'
        )
    samples = samples_of(data, recipe.data.pack)
    if batch > samples:
        raise RecipeError(f"training.batch = {batch}, but {recipe.data.pack or data} has {samples} samples to train on")
    if ranks > batch:
        raise RecipeError(
            f"{ranks} ranks share batches of {batch} samples, so some would have none; "
            f"start at most {batch} ranks, or raise training.batch"
        )
    if recipe.exchange.wire not in WIRES:
        raise RecipeError(f"exchange.wire = {recipe.exchange.wire!r}; there are {', '.join(WIRES)}")
    if algorithm not in ("auto", "library", "hierarchical/library"):
        check(algorithm)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as tables that TOML can hold; `parse_recipe` gives the same recipe back."""
    return dataclasses.asdict(recipe)


def differences(one: Recipe, other: Recipe) -> list[str]:
    """The keys in which two recipes differ, but for the ranks, which do not change what is trained."""
    first, second = _flat(to_dict(one)), _flat(to_dict(other))
    return [key for key in first if key != "ranks" and first[key] != second[key]]


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _change(content: dict[str, Any], change: str) -> None:
    """Make one change to a recipe's tables, in place."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {change}: not of the form key=value, as in training.epochs=3")
    *tables, last = (part.strip() for part in key.split("."))
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise RecipeError(f"--set {change}: {table!r} is a value, not a table")
    try:
        content[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        content[last] = text.strip()  # a word without quotes


def _parse(kind: type[Any], content: Mapping[str, Any], prefix: str, source: str) -> Any:
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in fields:
            raise RecipeError(f"{source}: unknown key {prefix}{key!s}{_nearest(key, prefix, fields)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{source}: {prefix}{key} is a table of keys, not the value {value!r}")
            values[key] = _parse(hints[key], value, f"{prefix}{key}.", source)
        else:
            values[key] = _value(value, hints[key], fields[key].metadata, f"{source}: {prefix}{key}")
    return kind(**values)


def _nearest(key: str, prefix: str, fields: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, fields, n=1)
    return (
        f"; did you mean {prefix}{near[0]}?" if near else f"; there are {', '.join(prefix + name for name in fields)}"
    )


def _value(value: Any, kind: type, limits: Mapping[str, Any], where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        word = {int: "a whole number", float: "a number", str: "a word"}[kind]
        raise RecipeError(f"{where} = {value!r} is not {word}")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise RecipeError(f"{where} = {value!r} is no number of a size that can be meant")
    if limits.get("above") is not None and not value > limits["above"]:
        raise RecipeError(f"{where} = {value!r}, but it has to be above {limits['above']}")
    if limits.get("at_least") is not None and not value >= limits["at_least"]:
        raise RecipeError(f"{where} = {value!r}, but it has to be at least {limits['at_least']}")
    if limits.get("one_of") and value not in limits["one_of"]:
        raise RecipeError(f"{where} = {value!r}; it is one of {', '.join(limits['one_of'])}")
    return value
