"""Plan of a run before it starts: on each number of nodes its step, speedup and memory, by prediction.

    layers ─ layer_costs ──▶ needed, ready ─┐
    machine ─ exchange_cost ─▶ a collective ─┼─── choose ────▶ overlap, buckets ─ predict ─▶ step ─▶ row (`run_row.py`)
    weights ─ bucket_layout ─▶ buckets ─────┘

`docs/planning.md` has the parts of a step; its update is that step without any communication, less computing.

Where layers can be split, a row with the splits follows the rows without, if they are faster. It is the same
prediction, with the tasks of split layers in the program (`split.py`) and their buckets in parts:

    layers, run in data parallelism ┐
    machine ─▶ costs of links       ┴▶ choose_splits ─▶ splits ─▶ step, memory of a rank

    cost of a byte sent     that of a byte of an allreduce, p / (2 (p - 1)) of it: a rank sends 2 (p - 1) / p of them;
                            within a node what its rows of one node say, else nothing

A run that chooses its layers (`plan="auto"`) measures what stands on the left, and then goes through the same
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import (
    MEASURED_BUCKET_BYTES,
    Candidate,
    PredictionInputs,
    candidates,
    initial_setting,
    is_searched,
    predicted,
    sizes_of,
)
from unisono.plan.exchange_cost import exchange_cost, placement_of, uneven_of
from unisono.plan.layer_costs import computing_of
from unisono.plan.planned_run import PlannedRun, check_run, memory_with, rank_memory
from unisono.plan.run_row import RunPlan, parts_with_loading, row_of, slow_link
from unisono.plan.split import (
    GroupLinks,
    LayerFacts,
    LinkCosts,
    SplitInputs,
    choose_splits,
    gradient_bytes,
    sent_of,
    with_splits,
)
from unisono.step.costs import Cost, fit
from unisono.step.rule import RankState

MAX_BUCKETS = 128
"""Largest number of buckets that a plan tries: a run tries more for a large model, which takes long to play."""

MAX_PLAYED_RANKS = 64
"""Largest number of ranks of a played program: one is played, and others count where they share its updates alone."""

COLLECTIVES_OF_A_SHARD = 3
"""Collectives for a bucket under a sharded rule: its reduce-scatter, flags and all-gather."""

WITH_SPLITS = " + split layers"
"""Words behind those of a rule whose layers are split."""


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
    memory = rank_memory(run)
    exchanged = memory.weights / run.rule.traits.period
    row = row_of(run, inputs, played, memory, exchanged, _alone(run) if alone is None else alone)
    slow = uneven_of(run.machine, run.nodes).slow_nodes if run.nodes > 1 else {}
    without = predict_step(run, even_cost(run))[1].prediction.step if slow else 0.0
    if slow and (words := slow_link(slow, played.prediction.step, without)):
        row = replace(row, bottleneck=f"{words}; {row.bottleneck}")
    return PredictedRun(row, inputs, played)


def predict_step(run: PlannedRun, cost: Cost) -> tuple[PredictionInputs, Candidate]:
    """Return the inputs of the prediction and the step where exchanges have this cost."""
    inputs = inputs_of(run, cost)
    return inputs, _chosen(inputs, run.ranks)


def inputs_of(run: PlannedRun, cost: Cost) -> PredictionInputs:
    """Return the inputs of the prediction where exchanges have this cost."""
    rule, played = run.rule, min(run.ranks, MAX_PLAYED_RANKS)
    computing = computing_of(run.layers, run.machine, run.traced, run.samples_of_rank, run.ranks_per_node)
    update = update_seconds(run) * (played / run.ranks if rule.traits.state is RankState.SHARDED else 1)
    sizes = [layer.gradient_bytes for layer in run.layers if layer.gradient_bytes]
    node = run.machine.node
    copying = max(run.ranks_per_node, node.accelerators) if run.ranks > 1 else 0  # each all gradients, at once
    if rule.traits.state is RankState.SHARDED:  # the sum of flags besides the two that were priced
        cost = cost._replace(latency=cost.latency * COLLECTIVES_OF_A_SHARD / 2)
    return PredictionInputs(
        rule,
        replace(
            computing,
            update=update,
            pack=copying / node.to_host if node.to_host else 0.0,
            unpack=copying / node.to_device if node.to_device else 0.0,
            streams=node.to_host > 0,
        ),
        partial(buckets_of, sizes),
        cost,
        ranks=played,
        clip=run.clip,
        layer_norms=run.layer_norms,
        nodes=run.nodes,
    )


def update_seconds(run: PlannedRun) -> float:
    """Return the seconds to update the weights of a byte of gradients, by memory alone, that of the accelerators where
    its bandwidth is known; 0 without any.

    An optimizer reads weights, gradients and what it keeps, and writes all but the gradients.
    """
    bandwidth = run.machine.node.device_bandwidth or run.machine.node.memory_bandwidth
    return (3 + 2 * run.kept) * run.ranks_per_node / bandwidth if bandwidth else 0.0


def _alone(run: PlannedRun) -> float:
    """Return the seconds of a step on one node, with its loading."""
    one = replace(run, nodes=1)
    return parts_with_loading(one, *predict_step(one, one.exchange.cost))[0].step


def _chosen(inputs: PredictionInputs, ranks: int) -> Candidate:
    """Return the setting that a run on so many ranks chooses, with its prediction."""
    rule = inputs.rule
    if not is_searched(rule) or ranks == 1:
        return predicted(inputs, initial_setting(rule, inputs.buckets, ranks))
    few = [size for size in sizes_of(rule) if len(inputs.buckets(size, 1)) <= MAX_BUCKETS]
    return candidates(inputs, few or sizes_of(rule)[-1:])[0]


def even_cost(run: PlannedRun) -> Cost:
    """Return the cost that a run's exchanges have without its machine's slow links: times the estimate without over the
    estimate with them, since a slow link may be in measured rows as well."""
    known, bare = run.exchange.cost, replace(run.machine, collectives=())
    slow = replace(run, machine=bare).exchange.cost if run.machine.collectives else known
    even = replace(run, machine=replace(bare, slow_links={})).exchange.cost
    found = [known.seconds(nbytes) * even.seconds(nbytes) / slow.seconds(nbytes) for nbytes in MEASURED_BUCKET_BYTES]
    return fit(MEASURED_BUCKET_BYTES, found)


def _with_split_layers(run: PlannedRun, found: PredictedRun, alone: float) -> list[RunPlan]:
    """Return the row with split layers beside that without; none where nothing is split."""
    if run.split is None or not run.rule.traits.groups or run.ranks == 1:
        return []
    facts, splits = run.split(run.ranks)
    given = split_inputs(run, found.inputs, facts)
    splits = choose_splits(given).splits if splits is None else splits
    if not splits:
        return []
    inputs = with_splits(given, splits)
    sent = (sent_of(given, layer, splits.get(layer.name)) for layer in given.layers)
    exchanged = sum(one.nbytes for one in sent) / gradient_bytes(1, inputs.ranks, 1)
    memory = memory_with(splits, found.row.memory, given)
    row = row_of(run, inputs, _chosen(inputs, inputs.ranks), memory, exchanged, alone)
    return [replace(row, rule=row.rule + WITH_SPLITS, split=splits)]


def split_inputs(run: PlannedRun, step: PredictionInputs, facts: tuple[LayerFacts, ...]) -> SplitInputs:
    """Return the inputs of the choice of splits for a step that is predicted in data parallelism."""
    placement = placement_of(run.nodes, run.ranks_per_node, run.machine.topology.supernode)
    weights = {layer.name: layer.gradient_bytes for layer in run.layers if layer.gradient_bytes}

    def of_sent(nodes: int) -> LinkCosts:
        """Return the costs on so many nodes, by the bytes that a rank sends."""
        sent, kinds = gradient_bytes(1.0, nodes * run.ranks_per_node, 1), ((run.wire, False, run.rule.algorithm), ())
        costs = (exchange_cost(run.machine, nodes, run.ranks_per_node, *kind).cost for kind in kinds)
        gradients, own = (Cost(cost.latency, cost.per_byte / sent if sent else 0.0) for cost in costs)
        return LinkCosts(gradients, own._replace(latency=own.latency / 2))  # an all-gather has half the messages

    links = GroupLinks(placement, of_sent(run.nodes), of_sent(1))
    return SplitInputs(facts, step, weights, run.samples_of_rank / run.traced, links)
