"""Recipes: the settings of a run as small frozen dataclasses, read from TOML. Needs neither PyTorch nor MPI."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.compute.formats import AUTO, PRECISIONS
from unisono.data.kinds import all_augments
from unisono.data.shuffle_options import ShuffleOptions, parse_shuffle
from unisono.data.splits import TRAIN_SAMPLES, train_samples
from unisono.data.storage import AUTO as AUTO_STORAGE
from unisono.data.storage import STORAGES
from unisono.errors import RecipeError
from unisono.models.user_network import check_name
from unisono.optimizers import OPTIMIZERS
from unisono.rules import RULES, Exchange
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.schedules import check
from unisono.tensor_parallel import ParallelPlan, make_plan
from unisono.training.keys import change, choice, flat, number, number_or, numbers, parse, texts_or
from unisono.training.named_rule import named_rule
from unisono.training.packaged_recipes import FOLDER
from unisono.user_function import UserFunction, is_user_function
from unisono.wires import WIRES

OWN = "own"
"""Wire that leaves gradients in their own number format."""

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


@dataclass(frozen=True)
class DataRecipe:
    """The data set, and its form in memory and in batches."""

    name: str = "digits"
    """Data set that comes with Unisono; not used where `pack` is given."""
    pack: str = ""
    """Folder of a packed data set, with train/ and test/; empty: the data set `name`."""
    storage: str = choice("partitioned", *STORAGES, AUTO_STORAGE)
    """Place of samples: "partitioned", a share in each rank; "replicated", a copy in each node, shared by its ranks;
    "streamed", read from the pack's files during training; "auto", chosen by the memory there is."""
    groups: int = number(1, at_least=1)
    """Copies of the pack over all ranks, one in each group of ranks; must be 1 unless `storage` is "partitioned"."""
    shuffle: str = "epoch"
    """Interval and scope of the shuffle: "epoch"; "every:N", every N epochs; "once"; the last two perhaps with
    ",parts:P": in between, samples stay in one of P parts of each batch."""
    buffer_megabytes: int = number(1024, at_least=1)
    """Size of the shuffle buffer over all ranks, if `storage` is "streamed". Two of them are in memory."""
    cache_megabytes: int = number(0, at_least=0)
    """Part of a pack that each node keeps in memory, if `storage` is "streamed"; the rest is read in each epoch."""
    size: int = number(0, at_least=0)
    """Height and width, in pixels, of the images that the network gets; 0: as raw images are."""
    windows: int = number(8, at_least=1)
    """Windows of an audio recording that the network gets, evenly spaced."""
    context: int = number(15, at_least=0)
    """Frames of 10 ms before the middle of each window, and as many after it."""
    augment: str = choice("none", *all_augments())
    """Random changes in training. Images: none, mirror, shift, scale. Audio: none, shift, mask."""
    threads: int = number(0, at_least=0)
    """Threads that decode samples, in each rank; 0: the rank's fair share of the cores, at most 8."""


@dataclass(frozen=True)
class ModelRecipe:
    """The network."""

    name: str = "small_convnet"
    """Name of a network in the catalogue, or `module:function` for a network of your own."""
    folder: str = ""
    """Folder that is searched for that module before the current folder; empty: the recipe's folder."""
    dtype: str = choice("float32", "float32", "float64")
    """Number format of the weights."""


@dataclass(frozen=True)
class OptimizerRecipe:
    """The optimizer, and the learning rate of each step (`training/learning_rate.py`)."""

    name: str = choice("sgd", *OPTIMIZERS)
    """Name of the optimizer."""
    learning_rate: float = number(0.05, above=0)
    """Learning rate before scaling; above 0."""
    for_batch: int = number(0, at_least=0)
    """Batch size that the rate is meant for: the rate is scaled by training.batch / for_batch, with "easgd" by the
    batch of one worker / for_batch; 0: it is not scaled."""
    warm_epochs: float = number(0.0, at_least=0)
    """Epochs of linear warm-up, from `learning_rate` where the rate is scaled, else from 0."""
    policy: str = choice("constant", "constant", "steps", "polynomial", "cosine")
    """Course of the rate after the warm-up: constant, steps, polynomial or cosine."""
    every: float = number(0.0, at_least=0)
    """Epochs between two drops of the `steps` policy; 0: a third of the run."""
    decay: float = number(0.1, above=0)
    """Factor of the rate at each drop of the `steps` policy; above 0."""
    power: float = number(1.0, above=0)
    """Exponent of the `polynomial` policy; above 0."""
    momentum: float = number(0.9, at_least=0)
    """Momentum; for `lamb`, Adam's first beta; not used by `adamw`."""
    betas: tuple[float, float] = numbers(0.9, 0.999, at_least=0, below=1)
    """Shares of the past in the means of gradients and of their squares, for `adamw`."""
    nesterov: bool = False
    """True for Nesterov momentum, of "sgd"."""
    weight_decay: float = number(0.0, at_least=0)
    """Weight decay of all parameters except those with one dimension (norms and biases)."""
    clip: float = number(0.0, at_least=0)
    """Largest norm of all gradients together; 0: no clipping."""


@dataclass(frozen=True)
class TrainingRecipe:
    """Length of a run, batch size, seed, checkpoints and time-out."""

    epochs: int = number(10, at_least=1)
    """Epochs of the whole run; at least 1."""
    batch: int = number(64, at_least=1)
    """Samples of a step, over all ranks together; at least 1."""
    seed: int = number(0, at_least=0)
    """Seed of the weights, the order of samples, and the random numbers of each step."""
    checkpoint_every: int = number(0, at_least=0)
    """Steps between two checkpoints; 0: one at the end of each epoch only."""
    checkpoint_minutes: float = number(0.0, at_least=0)
    """Minutes between two checkpoints by rank 0's clock, in addition to `checkpoint_every`; 0: none by time."""
    timeout: float = number(0.0, at_least=0)
    """Seconds that a rank waits for others before all ranks end; 0: the value of UNISONO_TIMEOUT, else 600."""


@dataclass(frozen=True)
class RuleRecipe:
    """The rule: the data that ranks exchange, and the steps in which they do."""

    name: str = "bsp"
    """Name of the rule: "bsp" averages gradients in each step; so does "sharded", where each rank updates a part of
    the weights; with "local_sgd" each rank updates alone, and weights are averaged; with "diloco" an outer optimizer
    applies their mean change; with "easgd" workers exchange with a centre, and none waits for another;
    "auto" is "bsp" or "sharded", whichever is predicted to be faster from the first steps; `module:function` is a rule
    of your own, which function(exchange, overlap) returns.
    """
    folder: str = ""
    """Folder that is searched for that module before the current folder; empty: the recipe's folder."""
    overlap: str = choice("auto", "auto", "chain", "concurrent", "funnel", "none")
    """Overlap of communication with the step; "auto" chooses it from measurements of the first steps."""
    scale: str = choice("mean", "mean", "sum")
    """Combination of the gradients, for "bsp": "mean" over all samples, or "sum" over ranks of their own means."""
    every: int | str = number_or("auto", 16, at_least=1)
    """Steps of a period, in which weights are exchanged once, for "local_sgd" and "diloco"; "auto": the smallest number
    of which the exchange hides behind computing."""
    outer_rate: float = number(0.7, above=0)
    """Learning rate of the outer optimizer, for "diloco"."""
    outer_momentum: float = number(0.9, at_least=0)
    """Nesterov momentum of the outer optimizer, for "diloco"; below 1."""
    fragments: int = number(4, at_least=1)
    """Parts of the weights that are exchanged one after another in a period, for "diloco"."""
    delay: int = number(1, at_least=0)
    """Steps beside which a fragment is exchanged, for "diloco"; 0 waits for it."""
    alpha: float = number(0.5, above=0)
    """Moving rate of "easgd": share of the difference that a worker and the centre move by; at most 1."""
    period: int = number(1, at_least=1)
    """Steps between two exchanges of a worker, for "easgd"."""
    server: str = choice("rank", "rank", "thread")
    """Place of the servers of "easgd": "rank", ranks that train nothing, or "thread", beside workers."""
    servers: int = number(1, at_least=1)
    """Servers of "easgd"; each keeps a part of the model."""
    staleness: int = number(0, at_least=0)
    """Largest number of exchanges of others between two of one worker, for "easgd"; 0: nobody waits."""


@dataclass(frozen=True)
class ExchangeRecipe:
    """The allreduce of gradients: algorithm, number format, size of buckets."""

    algorithm: str = "auto"
    """Name of a schedule; "library": MPI's allreduce; "auto": chosen by size from the table of choices."""
    wire: str = OWN
    """Number format of gradients between nodes; "own": that of the gradients."""
    bucket_megabytes: float = number(0, at_least=0)
    """Largest bucket in MiB; 0: chosen from measurements of the first steps."""


@dataclass(frozen=True)
class ParallelRecipe:
    """Layers that are split over groups of ranks; ranks of a group train on the same samples."""

    ranks: int = number(0, at_least=0)
    """Ranks in a group of the layers whose words have no size of their own; 0: all ranks."""
    layers: Mapping[str, str] | str = texts_or("auto")
    """Split of each layer, by its name, in words: "column", "row 4", "column 2 gives part", "row 2 takes part"; "auto":
    chosen by prediction from a measurement before the first step."""


@dataclass(frozen=True)
class ComputeRecipe:
    """Number format and convolution algorithms of the network."""

    precision: str = choice(AUTO, *PRECISIONS)
    """Number format of matrix products and convolutions; "auto": bfloat16 on a processor made for it, else float32."""
    convolutions: str = choice("autotune", "autotune", "library")
    """Algorithm of convolutions: "autotune", the fastest of each, timed before the first step; "library", PyTorch's."""
    plan: str = ""
    """File with timings of convolutions that several runs share; the run's folder has its own. Empty: none."""


@dataclass(frozen=True)
class Recipe:
    """A run."""

    name: str = "run"
    """Name of the run; its folder under runs/ begins with it."""
    ranks: int = number(1, at_least=1)
    """Ranks to start, unless --ranks or the launcher says otherwise."""
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    compute: ComputeRecipe = field(default_factory=ComputeRecipe)
    rule: RuleRecipe = field(default_factory=RuleRecipe)
    exchange: ExchangeRecipe = field(default_factory=ExchangeRecipe)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a file, with `changes` of the form key=value (`training.epochs=3`) applied.

    The folder of a network or rule of your own becomes an absolute path, so that a resumed run finds it again.
    Raises RecipeError naming the file or the change, the key, and for an unknown key the nearest one.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    recipe = parse_recipe(content, str(path))
    for wanted in changes:
        change(content, renamed_change(wanted))
        recipe = parse_recipe(content, f"--set {wanted}")
    for table in ("model", "rule"):
        if is_user_function((found := getattr(recipe, table)).name):
            beside = (
                Path.cwd() if path.resolve().parent == FOLDER else path.parent
            )  # nobody's code is beside packaged recipes
            folder = (beside / found.folder).resolve()
            recipe = replace(recipe, **{table: replace(found, folder=str(folder))})
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


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError when `ranks` ranks cannot run the recipe. Called before any rank is started."""
    data, batch, algorithm = recipe.data.name, recipe.training.batch, recipe.exchange.algorithm
    if data not in TRAIN_SAMPLES and not recipe.data.pack:
        raise RecipeError(f"data.name = {data!r}; there are {', '.join(TRAIN_SAMPLES)}")
    check_name(recipe.model.name, recipe.model.folder)
    check_rule(recipe.rule)
    optimizer = recipe.optimizer
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum):
        raise RecipeError(
            f"optimizer.nesterov = true, but optimizer.name = {optimizer.name!r} and optimizer.momentum = "
            f"{optimizer.momentum}: it needs sgd with a momentum above 0"
        )
    if recipe.data.storage != "partitioned" and recipe.data.groups > 1:
        raise RecipeError(
            f'data.groups = {recipe.data.groups}, but data.storage = "{recipe.data.storage}": only "partitioned" takes '
            "groups; leave groups away"
        )
    shuffle = parse_shuffle(recipe.data.shuffle)
    if shuffle.parts > batch:
        raise RecipeError(f"data.shuffle has {shuffle.parts} parts, but training.batch = {batch} samples to divide")
    samples = train_samples(data, recipe.data.pack)
    if batch > samples:
        raise RecipeError(f"training.batch = {batch}, but {recipe.data.pack or data} has {samples} samples to train on")
    sharing = check_parallel(recipe, ranks)
    if ranks > batch * sharing:
        raise RecipeError(
            f"{ranks} ranks share batches of {batch} samples, so some would have none; "
            f"start at most {batch * sharing} ranks, or raise training.batch"
        )
    if recipe.exchange.wire not in (OWN, *WIRES):
        raise RecipeError(f"exchange.wire = {recipe.exchange.wire!r}; there are {', '.join((OWN, *WIRES))}")
    if algorithm not in ("auto", "library"):
        check(algorithm)
    if not is_user_function(recipe.rule.name):
        wire = None if recipe.exchange.wire == OWN else recipe.exchange.wire
        rule = named_rule(recipe.rule, Exchange(algorithm, wire))
        if isinstance(rule, BaseAsynchronousRule):
            rule.seats(ranks)
            if shuffle != ShuffleOptions():
                raise RecipeError(
                    f'data.shuffle = "{shuffle}", but workers of rule.name = "{recipe.rule.name}" have samples of '
                    "their own and no shuffle; leave it away"
                )


def plan_of(recipe: Recipe, ranks: int) -> ParallelPlan | None:
    """Return the plan of the layers that are split; None where the recipe names none, or leaves them to a prediction.

    Raises UsageError for words that are no split.
    """
    layers = recipe.parallel.layers
    return make_plan(layers, recipe.parallel.ranks or ranks) if layers and not isinstance(layers, str) else None


def check_parallel(recipe: Recipe, ranks: int) -> int:
    """Return the number of ranks that train on the same samples. Raises RecipeError where groups do not divide the
    ranks, or the rule does not take split layers."""
    plan = plan_of(recipe, ranks)
    if plan is None:
        return 1
    if recipe.rule.name in RULES and recipe.rule.name != "bsp":
        raise RecipeError(f"rule.name = {recipe.rule.name!r} does not take the split layers of [parallel]: use bsp")
    if ranks % plan.sharing:
        raise RecipeError(
            f"parallel.layers share samples in groups of {plan.sharing} ranks, which do not divide {ranks} ranks: "
            f"start a multiple of {plan.sharing}, or change parallel.ranks"
        )
    return plan.sharing


def check_rule(rule: RuleRecipe) -> None:
    """Raise RecipeError for a name that is no rule, or whose module does not exist."""
    if is_user_function(rule.name):
        own_rule(rule).check()
    elif rule.name not in RULES:
        raise RecipeError(f"rule.name = {rule.name!r}; there are {', '.join(RULES)}, or module:function of your own")


def own_rule(rule: RuleRecipe) -> UserFunction:
    """Return the user's function that makes the rule, as the recipe names it."""
    return UserFunction("rule", rule.name, rule.folder, "a rule", "rules:largest")


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as tables that TOML can hold; `parse_recipe` gives the same recipe back."""
    return dataclasses.asdict(recipe)


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the keys in which two recipes differ, except `ranks`, which does not change the training."""
    first, second = flat(to_dict(one)), flat(to_dict(other))
    return [key for key in {**first, **second} if key != "ranks" and first.get(key) != second.get(key)]
