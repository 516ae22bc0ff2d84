"""Prediction of a planned run on a machine: its rows, and what they were made from.

run, machine ─ trace ─▶ layers ─┬─▶ settings ─▶ rows        plan/run_plan.py
                                └─▶ splits ───▶ rows, tables of layers
rows ─▶ wall time of a job                                  plan/wall_time.py
"""

from __future__ import annotations

from collections.abc import Sequence
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
from unisono.plan.split_plan import SplitModel, split_inputs
from unisono.plan.trace import Trace, TracedLayer, trace_shapes
from unisono.plan.wall_time import JobSeconds, job_seconds
from unisono.rules import BSP
from unisono.training.planned_layers import split_model_of
from unisono.training.planned_run import PlannedRun, settings_of


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
