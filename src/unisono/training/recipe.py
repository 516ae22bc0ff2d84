"""Recipes: a run as a small frozen value, read from TOML. Nothing here needs PyTorch or MPI."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.compute.formats import AUTO, PRECISIONS
from unisono.data.catalogue import SAMPLES, samples_of
from unisono.data.pictures.view import AUGMENTS as OF_PICTURES
from unisono.data.sounds.hearing import AUGMENTS as OF_SOUNDS
from unisono.errors import RecipeError
from unisono.models.own import check_name
from unisono.optimizers import OPTIMIZERS
from unisono.own import Own, is_own
from unisono.rules import RULES
from unisono.schedules import check
from unisono.training.keys import change, choice, flat, number, parse
from unisono.wires import WIRES

OWN = "own"
"""The wire that leaves gradients as they are."""

RENAMED: Mapping[tuple[str, str], tuple[str, str]] = {("exchange", "embedding"): ("rule", "overlap")}
"""Tables and keys of older recipes, and what they are called now."""


@dataclass(frozen=True)
class DataRecipe:
    """What is trained on."""

    name: str = "digits"
    pack: str = ""
    """The folder of a packed data set, with train/ and test/; else the data set that `name` says."""
    hold: str = choice("even", "even", "whole")
    """Each rank a share of the pack, or each node a copy that its ranks share."""
    groups: int = number(1, at_least=1)
    """Copies that the ranks hold together, each group of ranks one, where each has a share."""
    size: int = number(0, at_least=0)
    """Pixels across of what the network is shown of a picture; 0: as raw pictures are."""
    windows: int = number(8, at_least=1)
    """Places of a recording that the network hears, evenly spread."""
    context: int = number(15, at_least=0)
    """Frames of 10 ms that it hears before each place, and as many after it."""
    augment: str = choice("none", *dict.fromkeys((*OF_PICTURES, *OF_SOUNDS)))
    """What is changed at random in training, of pictures or of sounds."""
    threads: int = number(0, at_least=0)
    """That decode samples, in each rank; 0: the rank's fair share of the cores."""


@dataclass(frozen=True)
class ModelRecipe:
    """The network."""

    name: str = "small_convnet"
    """One of the catalogue's, or `module:function`: a network of one's own."""
    folder: str = ""
    """Where that module is looked for before the current folder; else where the recipe is."""
    dtype: str = choice("float32", "float32", "float64")


@dataclass(frozen=True)
class OptimizerRecipe:
    """What gradients are turned into: the optimizer, and the rate of each step (`training/learning_rate.py`)."""

    name: str = choice("sgd", *OPTIMIZERS)
    learning_rate: float = number(0.05, above=0)
    for_batch: int = number(0, at_least=0)
    """Samples of a step that the rate is meant for: it is scaled by training.batch / for_batch; 0: it is not."""
    warm_epochs: float = number(0.0, at_least=0)
    """Epochs of the warm start: the rate climbs straight, from `learning_rate` where it is scaled, else from 0."""
    policy: str = choice("constant", "constant", "steps", "polynomial", "cosine")
    """How the rate goes from there."""
    every: float = number(0.0, at_least=0)
    """Epochs between two of the `steps`; 0: a third of the run."""
    decay: float = number(0.1, above=0)
    """What each of the `steps` multiplies the rate by."""
    power: float = number(1.0, above=0)
    """Of the `polynomial`."""
    momentum: float = number(0.9, at_least=0)
    weight_decay: float = number(0.0, at_least=0)
    """Of all parameters but those of one dimension: norms and biases."""
    clip: float = number(0.0, at_least=0)
    """The norm that all gradients together have at most; 0: any."""


@dataclass(frozen=True)
class TrainingRecipe:
    """How long, in which batches, from which seed."""

    epochs: int = number(10, at_least=1)
    batch: int = number(64, at_least=1)
    """Samples of a step, over all ranks together."""
    seed: int = number(0, at_least=0)
    checkpoint_every: int = number(0, at_least=0)
    """Steps between two checkpoints; 0: one at the end of each epoch alone."""
    checkpoint_minutes: float = number(0.0, at_least=0)
    """Minutes between two checkpoints, by rank 0's clock, beside that; 0: as if it were not there."""
    timeout: float = number(0.0, at_least=0)
    """Seconds that a rank waits for others before all end; 0: as UNISONO_TIMEOUT says, else 600."""


@dataclass(frozen=True)
class RuleRecipe:
    """What ranks exchange, and when."""

    name: str = "bsp"
    """"bsp": averaged gradients in each step; "local_sgd": each rank updates alone, and weights are averaged; or
    `module:function`: a rule of one's own, which function(exchange, overlap) gives."""
    folder: str = ""
    """Where that module is looked for before the current folder; else where the recipe is."""
    overlap: str = choice("auto", "auto", "chain", "concurrent", "funnel", "none")
    """Where communication sits in the step."""
    every: int = number(16, at_least=1)
    """Steps between two averages of the weights, with local_sgd."""


@dataclass(frozen=True)
class ExchangeRecipe:
    """How gradients meet."""

    algorithm: str = "auto"
    wire: str = OWN
    """The number format between nodes."""
    bucket_megabytes: float = number(0, at_least=0)
    """The largest bucket; 0: what the first steps show to be best."""


@dataclass(frozen=True)
class ComputeRecipe:
    """How the network is computed."""

    precision: str = choice(AUTO, *PRECISIONS)
    """The number format of products: float32, bfloat16, or what the processor is made for."""
    convolutions: str = choice("tried", "tried", "library")
    """Each by the way that was fastest before the first step, or all by PyTorch's own."""
    plan: str = ""
    """A file for what was tried, which several runs share; the run's folder has its own."""


@dataclass(frozen=True)
class Recipe:
    """A run."""

    name: str = "run"
    ranks: int = number(1, at_least=1)
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    compute: ComputeRecipe = field(default_factory=ComputeRecipe)
    rule: RuleRecipe = field(default_factory=RuleRecipe)
    exchange: ExchangeRecipe = field(default_factory=ExchangeRecipe)


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `changes` of the form key=value (`training.epochs=3`) made to it.

    The folder of a network or a rule of one's own is made whole, so that a run finds it again when it goes on.
    Raises RecipeError naming the file or the change, the key, and the nearest key where there is no such one.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    recipe = parse_recipe(content, str(path))
    for wanted in changes:
        change(content, wanted)
        recipe = parse_recipe(content, f"--set {wanted}")
    for table in ("model", "rule"):
        if is_own((found := getattr(recipe, table)).name):
            folder = (path.parent / found.folder).resolve()
            recipe = replace(recipe, **{table: replace(found, folder=str(folder))})
    return recipe


def parse_recipe(content: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe that a parsed TOML file holds; `source` names it in errors."""
    return parse(Recipe, renamed(content), source)


def renamed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tables with today's names for keys that had others: the recipes of older runs are read as well."""
    found = dict(content)
    for (table, key), (new_table, new_key) in RENAMED.items():
        old, new = found.get(table), found.get(new_table, {})
        if isinstance(old, dict) and key in old and isinstance(new, dict):
            found[table] = {name: value for name, value in old.items() if name != key}
            found[new_table] = {new_key: old[key], **new}
    return found


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise RecipeError when `ranks` ranks cannot carry the recipe out: known before any of them is started."""
    data, batch, algorithm = recipe.data.name, recipe.training.batch, recipe.exchange.algorithm
    if data not in SAMPLES and not recipe.data.pack:
        raise RecipeError(f"data.name = {data!r}; there are {', '.join(SAMPLES)}")
    check_name(recipe.model.name, recipe.model.folder)
    check_rule(recipe.rule)
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
    if recipe.exchange.wire not in (OWN, *WIRES):
        raise RecipeError(f"exchange.wire = {recipe.exchange.wire!r}; there are {', '.join((OWN, *WIRES))}")
    if algorithm not in ("auto", "library"):
        check(algorithm)


def check_rule(rule: RuleRecipe) -> None:
    """Raise RecipeError for a name that is neither a rule's nor of a module that is there."""
    if is_own(rule.name):
        own_rule(rule).check()
    elif rule.name not in RULES:
        raise RecipeError(f"rule.name = {rule.name!r}; there are {', '.join(RULES)}, or module:function of your own")


def own_rule(rule: RuleRecipe) -> Own:
    """Return the function that a recipe names, which makes a rule."""
    return Own("rule", rule.name, rule.folder, "a rule", "rules:largest")


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as tables that TOML can hold; `parse_recipe` gives the same recipe back."""
    return dataclasses.asdict(recipe)


def differences(one: Recipe, other: Recipe) -> list[str]:
    """The keys in which two recipes differ, but for the ranks, which do not change what is trained."""
    first, second = flat(to_dict(one)), flat(to_dict(other))
    return [key for key in first if key != "ranks" and first[key] != second[key]]
