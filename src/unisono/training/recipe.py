"""Recipes: the settings of a run as small frozen dataclasses, one for each table. Needs neither PyTorch nor MPI."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.compute import PRECISIONS
from unisono.data.options import DataOptions
from unisono.optimizers import OPTIMIZERS
from unisono.processor import AUTO, HOST
from unisono.rules import all_options
from unisono.tables import choice, flat, number, texts_or
from unisono.training.learning_rate import POLICIES

OWN = "own"
"""Wire that leaves gradients in their own number format."""


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
    overlap: str = choice("auto", "auto", "chain", "concurrent", "funnel", "none")
    """Overlap of communication with the step; "auto" chooses it from measurements of the first steps."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the rule: the fields of its class in `unisono.rules`, such as `every` of "local_sgd". They are keys of
    [rule] itself, or of a table [rule.options]; those of other rules have no effect."""

    def __post_init__(self) -> None:
        defaults = {key: one.default for key, one in all_options(self.name).items()}
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
    """Layers that are split over groups of ranks; ranks of a group train on the same samples."""

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
    threads: int = number(0, at_least=0)
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
    found = dataclasses.asdict(recipe)
    found["rule"] |= found["rule"].pop("options")
    return found


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the keys in which two recipes differ, except `ranks`, which does not change the training."""
    first, second = flat(to_dict(one)), flat(to_dict(other))
    return [key for key in {**first, **second} if key != "ranks" and first.get(key) != second.get(key)]
