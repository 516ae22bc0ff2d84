"""Recipes: the settings of a run as small frozen dataclasses, one for each table, and their files in TOML.

Files of older releases are read, too. Those that come with the package have a name. What follows from tables alone is
here as well: the learning rate of each step. Needs neither PyTorch nor MPI.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from unisono.compute import PRECISIONS
from unisono.data.options import DataOptions
from unisono.errors import RecipeError
from unisono.optimizers import OPTIMIZERS
from unisono.processor import AUTO, HOST
from unisono.rules import all_options
from unisono.tables import change, choice, flat, number, parse, texts_or
from unisono.user_function import is_user_function

OWN = "own"
"""Wire that leaves gradients in their own number format."""

POLICIES: dict[str, Callable[[OptimizerRecipe, float, float], float]] = {
    "constant": lambda *_: 1.0,
    "steps": lambda options, epoch, epochs: options.decay ** math.floor(epoch / (options.every or epochs / 3)),
    "polynomial": lambda options, epoch, epochs: (1 - _done(options, epoch, epochs)) ** options.power,
    "cosine": lambda options, epoch, epochs: (1 + math.cos(math.pi * _done(options, epoch, epochs))) / 2,
}
"""Functions that return the share of the goal after `epoch` of `epochs` epochs, once the warm-up is over."""


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
    """The optimizer, and the learning rate of each step (`rate_at`)."""

    name: str = choice("sgd", *OPTIMIZERS)
    """Name of the optimizer."""
    learning_rate: float = number(0.05, above=0)
    """Learning rate before scaling; above 0."""
    for_batch: int = number(0, at_least=0)
    """Batch size that the rate is meant for: the rate is scaled by training.batch / for_batch, with "easgd" by the
    batch of one worker / for_batch; 0: it is not scaled."""
    warm_epochs: float = number(0.0, at_least=0)
    """Epochs of linear warm-up, from `learning_rate` where the rate is scaled, else from 0."""
    policy: str = choice("constant", *POLICIES)
    """Course of the rate after the warm-up: constant, steps, polynomial or cosine."""
    every: float = number(0.0, at_least=0)
    """Epochs between two drops of the `steps` policy; 0: a third of the run."""
    decay: float = number(0.1, above=0)
    """Factor of the rate at each drop of the `steps` policy; above 0."""
    power: float = number(1.0, above=0)
    """Exponent of the `polynomial` policy; above 0."""
    momentum: float = number(0.9, at_least=0)
    """Momentum; for `lamb`, Adam's first beta; not used by `adamw`."""
    betas: tuple[float, float] = number((0.9, 0.999), at_least=0, below=1)
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
    virtual_ranks: int = number(0, at_least=0)
    """Fixed shares of each batch, whose gradients are summed exactly: weights then have the same bits for any number of
    ranks up to this; 0: each rank is a share, and sums are those of `exchange.wire`."""
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
    `module:function` is a rule of your own, which function(exchange, overlap) returns.
    """
    folder: str = ""
    """Folder that is searched for that module before the current folder; empty: the recipe's folder."""
    overlap: str = choice("auto", "auto", "chain", "phases", "concurrent", "funnel", "none")
    """Overlap of communication with the step; "auto" chooses it from measurements of the first steps."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the rule: the fields of its class in `unisono.rules`, such as `every` of "local_sgd". They are keys of
    [rule] itself, or of a table [rule.options]; those of other rules have no effect."""

    def __post_init__(self) -> None:
        defaults = {key: option.default for key, option in all_options(self.name).items()}
        object.__setattr__(self, "options", {**defaults, **self.options})


@dataclass(frozen=True)
class ExchangeRecipe:
    """The allreduce of gradients: algorithm, number format, size of buckets."""

    algorithm: str = "auto"
    """Name of a schedule; "library": MPI's allreduce; "auto": chosen by size from the table of choices."""
    wire: str = OWN
    """Number format of gradients between nodes; "own": that of the gradients, or "exact" with virtual ranks; "exact":
    sums whose bits depend on no algorithm, bucket or order of ranks."""
    bucket_megabytes: float = number(0, at_least=0)
    """Largest bucket in MiB; 0: chosen from measurements of the first steps."""


@dataclass(frozen=True)
class ParallelRecipe:
    """Layers that are split over groups of ranks, each with its own samples: activations are exchanged."""

    ranks: int = number(0, at_least=0)
    """Ranks in a group of the layers whose words have no size of their own; 0: all ranks."""
    layers: Mapping[str, str] | str = texts_or("auto")
    """Split of each layer, by its name, in words: "column", "row 4", "column 2 gives part", "row 2 takes part"; "auto":
    chosen by prediction from a measurement before the first step."""


@dataclass(frozen=True)
class ComputeRecipe:
    """Device, number format and convolution algorithms of the network."""

    device: str = HOST
    """Device of each rank: "cpu"; "auto", the accelerators of its node, one for each rank there, or the processor where
    there are none; a kind of them as PyTorch calls it, one for each rank; with a number (kind:0), one for all ranks."""
    precision: str = choice(AUTO, *PRECISIONS)
    """Number format of matrix products and convolutions; "auto": bfloat16 on a device made for it, else float32."""
    convolutions: str = choice("autotune", "autotune", "library")
    """Algorithm of convolutions: "autotune", the fastest of each, timed before the first step; "library", PyTorch's,
    as always on an accelerator."""
    threads: int = number(0, at_least=0, at_most=1024)
    """Threads that compute on each rank; 0: those of its cores, or 1 with virtual ranks, whose bits depend on them."""
    plan: str = ""
    """File with timings of convolutions that several runs share; the run's folder has its own. Empty: none."""


@dataclass(frozen=True)
class AuditRecipe:
    """Evidence that each step of a run with virtual ranks is right."""

    chain: bool = False
    """True to write the hashes of each step, by which `unisono audit` recomputes one, into the run's folder."""
    fraction: float = number(0.0, at_least=0)
    """Fraction of all shares that a second rank computes again, while the run goes on; at most 1, all of them."""


@dataclass(frozen=True)
class Recipe:
    """A run."""

    name: str = "run"
    """Name of the run; its folder under runs/ begins with it."""
    ranks: int = number(1, at_least=1)
    """Ranks to start, unless --ranks or the launcher says otherwise."""
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    compute: ComputeRecipe = field(default_factory=ComputeRecipe)
    rule: RuleRecipe = field(default_factory=RuleRecipe)
    exchange: ExchangeRecipe = field(default_factory=ExchangeRecipe)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    audit: AuditRecipe = field(default_factory=AuditRecipe)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as tables that TOML can hold; `parse_recipe` gives the same recipe back."""
    tables = asdict(recipe)
    tables["rule"] |= tables["rule"].pop("options")
    return tables


def differences(recipe: Recipe, other: Recipe) -> list[str]:
    """Return the keys in which two recipes differ, except `ranks`, which does not change the training."""
    first, second = flat(to_dict(recipe)), flat(to_dict(other))
    return [key for key in {**first, **second} if key != "ranks" and first.get(key) != second.get(key)]


def threads_of(recipe: Recipe) -> int:
    """Return the number of threads that compute on each rank; 0: those of its cores."""
    return recipe.compute.threads or int(recipe.training.virtual_ranks > 0)


# Learning rate -------------------------------------------------------------------------------------------------------


def rate_at(options: OptimizerRecipe, epoch: float, epochs: float, batch: int) -> float:
    """Return the learning rate after `epoch` of `epochs` epochs (3.5: three and a half; fewer than `epochs`): a pure
    function of the progress of a run, so that a resumed run continues exactly.

        goal ┤     ╱▔▔▔▔▔╲         goal          learning_rate; with for_batch, learning_rate x batch / for_batch
             │   ╱        ╲        warm start    straight to the goal: from learning_rate with for_batch, else from 0
             │ ╱           ╲       constant      goal
             └──────┬───────▶      steps         goal x decay ^ (how many times `every` epochs are over)
              warm  │ policy       polynomial    goal x (1 - done) ^ power
              start │              cosine        goal x (1 + cos(pi done)) / 2

    `done` is the share of the epochs after the warm start that is over; `every` counts from the beginning of the run.
    `batch` is the samples of a step whose gradients an update applies: over all ranks together, or a worker's own.

    DIMD (section 5, after Goyal et al. 2017) begins at 0.1, climbs in 5 epochs to 0.1 k n / 256, with k samples on each
    of n GPUs, and divides by 10 after every 30 of 90: learning_rate = 0.1, for_batch = 256, warm_epochs = 5, policy =
    "steps", every = 30, and training.batch is k n. For 8,192 samples:

        epoch    0     2.5    5      29.9   30     60      89.9
        rate     0.1   1.65   3.2    3.2    0.32   0.032   0.032

    Theano-MPI's GoogLeNet has "polynomial" with power = 0.5, its AlexNet "steps" with every = 20 (section 4).
    """
    goal = options.learning_rate * batch / options.for_batch if options.for_batch else options.learning_rate
    if epoch < options.warm_epochs:
        begin = min(options.learning_rate, goal) if options.for_batch else 0.0
        return begin + (goal - begin) * epoch / options.warm_epochs
    return goal * POLICIES[options.policy](options, epoch, epochs)


def rate_of_step(options: OptimizerRecipe, epoch: int, step: int, steps: int, epochs: int, batch: int) -> float:
    """Return the rate of step `step` of the `steps` of an epoch, both from 0, taken at the middle of that step."""
    return rate_at(options, epoch + (step + 0.5) / steps, epochs, batch)


def _done(options: OptimizerRecipe, epoch: float, epochs: float) -> float:
    return (epoch - options.warm_epochs) / (epochs - options.warm_epochs)


# Files ---------------------------------------------------------------------------------------------------------------

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

    The folder of a network or rule of your own becomes an absolute path, as do those of data and the file of a
    convolution plan, which are given from the current folder: a resumed run finds them again.
    Raises RecipeError naming the file or the change, the key, and for an unknown key the nearest one.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    if not content:
        raise RecipeError(f"the recipe {path} is empty; write what differs from the defaults, such as training.epochs")
    recipe = parse_recipe(kind, content, str(path), changes)
    for table in ("model", "rule"):
        if is_user_function((options := getattr(recipe, table)).name):
            packaged = path.resolve().parent == FOLDER  # nobody's code is beside those
            folder = ((Path.cwd() if packaged else path.parent) / options.folder).resolve()
            recipe = replace(recipe, **{table: replace(options, folder=str(folder))})
    given = recipe.data.pack, recipe.data.files, recipe.compute.plan
    pack, files, plan = (place and str(Path(place).absolute()) for place in given)
    return replace(
        recipe, data=replace(recipe.data, pack=pack, files=files), compute=replace(recipe.compute, plan=plan)
    )


def parse_recipe(
    kind: type[AnyRecipe], content: Mapping[str, Any], source: str, changes: Sequence[str] = ()
) -> AnyRecipe:
    """Return the recipe of this kind in the tables of `source`, with `changes` of the form key=value applied."""
    tables, each = dict(renamed(content)), [(wanted, dict[str, Any]()) for wanted in changes]
    for wanted, alone in each:
        for target in (tables, alone):
            change(target, renamed_change(wanted))
    rule = tables.get("rule")
    for wanted, alone in each:  # checked by itself, as of the rule that is named: its error names it
        if isinstance(rule, Mapping) and "name" in rule and isinstance(alone.get("rule"), dict):
            alone["rule"].setdefault("name", rule["name"])
        _parse(kind, renamed(alone), f"--set {wanted}")
    return _parse(kind, renamed(tables), source)


def _parse(kind: type[AnyRecipe], tables: Mapping[str, Any], source: str) -> AnyRecipe:
    """Return the recipe in tables of current names. The options of its rule are those that the rules' classes have, as
    keys of [rule] itself, or of its table `options`."""
    rule = tables.get("rule", {})
    if not isinstance(rule, Mapping):
        return parse(kind, tables, source)  # an error
    recipe = parse(kind, {name: table for name, table in tables.items() if name != "rule"}, source)
    given = {key: value for key, value in rule.items() if key != "options"}
    options = rule.get("options", {})
    if not isinstance(options, Mapping):
        raise RecipeError(f"{source}: rule.options is a table of keys, not the value {options!r}")
    if given.get("every") == "auto":
        raise RecipeError(
            f'{source}: rule.every = "auto" was measured by an older release; give a number: --set rule.every=16'
        )
    plain = {option.name: option for option in fields(RuleRecipe) if option.name != "options"}
    known = {**plain, **all_options(str(given.get("name", RuleRecipe.name)))}
    columns = [
        (option.name, type(option.default), field(default=option.default, metadata=option.metadata))
        for option in known.values()
    ]
    values = dict(vars(parse(make_dataclass("Rule", columns), {**options, **given}, source, name="rule")))
    name, folder, overlap = (values.pop(key) for key in plain)
    return replace(recipe, rule=RuleRecipe(name, folder, overlap, values))


def renamed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tables with keys and values of older recipes replaced by their current names."""
    tables = dict(content)
    for (table, key), (new_table, new_key) in RENAMED.items():
        old = tables.get(table)
        if isinstance(old, dict) and key in old and isinstance(tables.get(new_table, {}), dict):
            tables[table] = {name: value for name, value in old.items() if name != key}
            tables[new_table] = {new_key: old[key], **tables.get(new_table, {})}
    for (table, key), values in RENAMED_VALUES.items():
        value = tables[table].get(key) if isinstance(tables.get(table), dict) else None
        if isinstance(value, str) and value in values:
            tables[table] = {**tables[table], key: values[value]}
    return tables


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
