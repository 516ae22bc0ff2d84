"""Plan of a run before it starts: on each number of nodes its step, speedup and memory, by prediction.

    layers ─ layer_costs ──▶ needed, ready ─┐
    machine ─ exchange_cost ─▶ a collective ─┼─── choose ────▶ overlap, buckets ─ predict ─▶ step ─▶ row (`run_row.py`)
    weights ─ bucket_layout ─▶ buckets ─────┘

    step           the rule's own program on a clock, in the setting that a run would choose with these times
    update         that step without any communication, less computing: updates that do not hide
    communication  the rest of the step: exchanges that do not hide
    speedup        the step of one node, same minibatch, over this one
    efficiency     speedup / nodes

Worked example (`docs/planning.md`): 256 images of VGG-A on 16 nodes of 1.67 TFLOP/s with 10 Gbit/s Ethernet.

Where layers can be split (`split_plan.py`), a row with the splits follows the rows without, if they are faster. It is
the same prediction, with the tasks of split layers in the program and their buckets in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import (
    Candidate,
    PredictionInputs,
    candidates,
    initial_setting,
    is_searched,
    predicted_again,
    space_of,
)
from unisono.plan.exchange_cost import COLLECTIVES_OF_A_SHARD, even_cost
from unisono.plan.layer_costs import computing_of
from unisono.plan.loading import held_bytes, least_step
from unisono.plan.planned_run import PlannedRun, check_run
from unisono.plan.rank_memory import rank_memory
from unisono.plan.run_row import RunPlan, row_of, slow_link
from unisono.plan.split import gradient_bytes, sent_of, with_splits
from unisono.plan.split_plan import WITH_SPLITS, memory_with, split_inputs
from unisono.step.costs import Cost
from unisono.step.rule import RankState

MAX_BUCKETS = 128
"""Largest number of buckets that a plan tries: a run tries more for a large model, which takes long to play."""

MAX_PLAYED_RANKS = 64
"""Largest number of ranks of a played program: one is played, and others count where they share its updates alone."""


class PredictedRun(NamedTuple):
    """Row of a run, and the step that was played for it."""

    row: RunPlan
    inputs: PredictionInputs
    played: Candidate


def plan_run(run: PlannedRun, nodes: Sequence[int]) -> list[RunPlan]:
    """Return a row for each number of nodes, and behind them one with split layers for each where these are faster.

    Raises UsageError as `check_run`.
    """
    check_run(replace(run, nodes=max(nodes)))
    alone = _alone(run)
    rows, split_rows = list[RunPlan](), list[RunPlan]()
    for here in (replace(run, nodes=count) for count in nodes):
        found = predict_run(here, alone)
        rows.append(found.row)
        split_rows += _with_split_layers(here, found, alone)
    return rows + split_rows


def predict_run(run: PlannedRun, alone: float | None = None) -> PredictedRun:
    """Return the prediction of a run whose layers are whole, in the setting that it chooses with these times.

    `alone` are the seconds of that step on one node, with its loading; None: they are predicted as well. Raises
    UsageError as `check_run`.
    """
    check_run(run)
    inputs, played = predict_step(run, run.exchange.cost)
    held = held_bytes(run.samples, run.epoch_samples, run.nodes, run.ranks)
    memory = rank_memory(run.layers, run.traced, run.samples_of_rank, run.ranks, run.rule, run.kept, held)
    exchanged = memory.weights / run.rule.traits.period
    row = row_of(run, inputs, played, memory, exchanged, _alone(run) if alone is None else alone)
    slow = _slow_link(run, played.prediction.step)
    return PredictedRun(replace(row, bottleneck=f"{slow}; {row.bottleneck}") if slow else row, inputs, played)


def predict_step(run: PlannedRun, cost: Cost) -> tuple[PredictionInputs, Candidate]:
    """Return the inputs of the prediction and the step where exchanges have this cost."""
    inputs = inputs_of(run, cost)
    return inputs, _chosen(inputs, run.ranks)


def inputs_of(run: PlannedRun, cost: Cost) -> PredictionInputs:
    """Return the inputs of the prediction where exchanges have this cost."""
    rule, played = run.rule, min(run.ranks, MAX_PLAYED_RANKS)
    computing = computing_of(run.layers, run.machine, run.traced, run.samples_of_rank, run.ranks_per_node)
    update = update_seconds(run) * (played / run.ranks if rule.traits.state is RankState.SHARDED else 1)
    sizes = [layer.parameter_bytes for layer in run.layers if layer.parameters]
    if rule.traits.state is RankState.SHARDED:  # the sum of flags besides the two that were priced
        cost = cost._replace(latency=cost.latency * COLLECTIVES_OF_A_SHARD / 2)
    return PredictionInputs(
        rule,
        replace(computing, update=update),
        partial(buckets_of, sizes),
        cost,
        ranks=played,
        clip=run.clip,
        layer_norms=run.layer_norms,
        nodes=run.nodes,
    )


def update_seconds(run: PlannedRun) -> float:
    """Return the seconds to update the weights of a byte of gradients, by memory alone; 0 without its bandwidth.

    An optimizer reads weights, gradients and what it keeps, and writes all but the gradients.
    """
    bandwidth = run.machine.node.memory_bandwidth
    return (3 + 2 * run.kept) * run.ranks_per_node / bandwidth if bandwidth else 0.0


def _alone(run: PlannedRun) -> float:
    """Return the seconds of a step on one node, with its loading."""
    one = replace(run, nodes=1)
    step = predict_step(one, one.exchange.cost)[1].prediction.step
    return max(step, least_step(step, 0.0, one.loading))


def _chosen(inputs: PredictionInputs, ranks: int) -> Candidate:
    """Return the setting that a run on so many ranks chooses, with its prediction."""
    rule = inputs.rule
    if not is_searched(rule) or ranks == 1:
        return predicted_again(initial_setting(rule, inputs.buckets, ranks), inputs)
    overlaps, largest, outstandings = space_of(rule)
    few = [size for size in largest if len(inputs.buckets(size, 1)) <= MAX_BUCKETS] or [max(largest)]
    return candidates(inputs, overlaps, few, outstandings)[0]


def _slow_link(run: PlannedRun, step: float) -> str:
    """Return the sentence about the slow link that costs most; predict the step without any."""
    slow = {node: times for node, times in run.machine.slow_links.items() if node < run.nodes}
    if not slow or run.nodes == 1:
        return ""
    kind = run.rule.exchange.wire, run.rule.traits.state is RankState.SHARDED, run.rule.algorithm
    even = even_cost(run.exchange.cost, run.machine, run.nodes, run.ranks_per_node, *kind)
    return slow_link(slow, step, predict_step(run, even)[1].prediction.step)


def _with_split_layers(run: PlannedRun, found: PredictedRun, alone: float) -> list[RunPlan]:
    """Return the row with split layers beside that without; none where nothing is split."""
    if run.split is None or not run.rule.traits.groups or run.ranks == 1:
        return []
    given = split_inputs(run, found.inputs, run.split)
    splits = run.split.choose(given)
    if not splits:
        return []
    inputs = with_splits(given, splits)
    sent = (sent_of(given, layer, splits.get(layer.name)) for layer in given.layers)
    exchanged = sum(one.gradient_bytes + one.activation_bytes for one in sent) / gradient_bytes(1, inputs.ranks, 1)
    memory = memory_with(splits, found.row.memory, given)
    row = row_of(run, inputs, _chosen(inputs, inputs.ranks), memory, exchanged, alone)
    return [replace(row, rule=row.rule + WITH_SPLITS, split=splits)]
