"""Prediction of a planned run on a machine: its rows, and what they were made from.

run, machine ─ trace ─▶ layers ─┬─▶ settings ─▶ rows        plan/run_plan.py
                                └─▶ splits ───▶ rows, tables of layers
rows ─▶ wall time of a job                                  plan/wall_time.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.plan.choose import is_searched
from unisono.plan.exchange_cost import exchange_cost
from unisono.plan.layer_table import PlannedLayer, planned_layers
from unisono.plan.loading import unknown_rates
from unisono.plan.machines import MachineFacts
from unisono.plan.run_plan import inputs_of, plan_run
from unisono.plan.run_row import RunPlan
from unisono.plan.run_settings import RunSettings, check_settings
from unisono.plan.simulated_cost import without_rows
from unisono.plan.split import LayerFacts, SplitInputs
from unisono.plan.split_plan import SplitModel, split_inputs
from unisono.plan.trace import Trace, TracedLayer, trace_shapes
from unisono.plan.wall_time import JobSeconds, job_seconds
from unisono.rules import BSP
from unisono.tensor_parallel.check import check_plan
from unisono.tensor_parallel.choose_plan import facts_of, whole_layers
from unisono.tensor_parallel.plan import AUTO, make_plan
from unisono.training.planned_run import PlannedRun, settings_of
from unisono.training.recipe import ParallelRecipe


class TracedNetwork(NamedTuple):
    """Network without memory for weights, and its layers for an example."""

    network: nn.Module
    samples: int
    """Samples that it is traced for."""
    trace: Trace


class RunPrediction(NamedTuple):
    """Rows of a run on a machine, and what they were made from."""

    run: PlannedRun
    machine: MachineFacts
    settings: RunSettings
    layers: Sequence[TracedLayer]
    split: SplitModel
    rows: list[RunPlan]


def traced_network(network: nn.Module, example: Tensor) -> TracedNetwork:
    """Return the network with its layers. Raises UsageError, naming the layer, for one that cannot be traced."""
    return TracedNetwork(network, len(example), trace_shapes(network, example))


def predict_rows(
    run: PlannedRun, machine: MachineFacts, traced: TracedNetwork, nodes: tuple[int, ...], ranks_per_node: int
) -> RunPrediction:
    """Return the prediction of a run on these numbers of nodes.

    Raises UsageError for settings that no run can have, or that cannot be predicted.
    """
    layers, samples = traced.trace.layers, traced.samples
    settings = settings_of(run, nodes, ranks_per_node, samples)
    check_settings(layers, machine, settings)
    split = split_model_of(run, traced.network, traced.trace, samples)
    return RunPrediction(run, machine, settings, layers, split, plan_run(layers, machine, settings, split))


def layers_on(found: RunPrediction, nodes: int) -> list[PlannedLayer]:
    """Return the layers of a run on `nodes` nodes: with the splits of its row there, if it has one."""
    settings, layers = found.settings, found.layers
    machine = without_rows(found.machine) if settings.simulated else found.machine
    row = next(row for row in reversed(found.rows) if row.nodes == nodes)
    cost = exchange_cost(machine, nodes, settings.ranks_per_node).cost
    step = inputs_of(layers, machine, settings, BSP(), nodes, cost)
    inputs = split_inputs(layers, machine, settings, nodes, step, found.split)
    return planned_layers(layers, settings.traced, machine, inputs, row.split)


def notes_of(found: RunPrediction) -> list[str]:
    """Return lines about what the rows leave out."""
    return unknown_rates(found.machine, found.settings.samples)


def job_of(found: RunPrediction) -> JobSeconds:
    """Return the wall time of the job, by part: with split layers where the recipe asks for them.

    Raises UsageError unless there is one rule on one number of nodes, and without the samples of an epoch.
    """
    settings, whole = found.settings, [row for row in found.rows if not row.split]
    if len(whole) != 1 or settings.epoch_samples is None:
        raise UsageError("--time is that of one rule on one number of nodes, with --epoch-samples: give one of each")
    (rule,), row = settings.rules.values(), found.rows[-1] if found.run.parallel.layers else whole[0]
    return job_seconds(row, found.machine, settings, found.layers, is_searched(rule), found.run.job)


def split_model_of(run: PlannedRun, network: nn.Module, traced: Trace, samples: int) -> SplitModel:
    """Return a network, traced for `samples` samples, as a plan splits it: by prediction, or as a recipe says.

    Nothing is split where no rule, or the optimizer, takes split layers. Raises UsageError for a recipe whose layers
    are split under rules that do not take them.
    """
    able = [rule for rule in run.rules.values() if whole_layers(rule, run.optimizer) is None]
    given = run.parallel.layers or AUTO
    if not able and not isinstance(given, str):
        raise UsageError(f"[parallel] names layers, but no rule of {', '.join(run.rules)} takes split ones: plan bsp")

    def facts(ranks: int) -> tuple[LayerFacts, ...]:
        return facts_of(network, traced.layers, traced.once, samples, ranks)

    if not able:
        return SplitModel(facts, lambda _: {})
    if isinstance(given, str):
        return SplitModel(facts)
    return SplitModel(facts, splits_of(run.parallel, network))


def splits_of(parallel: ParallelRecipe, network: nn.Module) -> Callable[[SplitInputs], Mapping[str, str]]:
    """Return the function that gives the splits of a recipe's table [parallel], whatever the machine.

    It raises UsageError for splits that the network or the ranks do not allow.
    """

    def choose(inputs: SplitInputs) -> Mapping[str, str]:
        assert not isinstance(parallel.layers, str), "the layers are named"
        ranks = inputs.links.placement.ranks
        plan = check_plan(make_plan(parallel.layers, parallel.ranks or ranks), network, ranks)
        return plan.words

    return choose
