"""Plan of a run before it starts: for each rule and number of nodes its step, speedup and memory, by prediction.

    layers ─ layer_costs ──▶ needed, ready ─┐
    machine ─ exchange_cost ─▶ a collective ─┼─── choose ────▶ overlap, buckets ─ predict ─▶ step ─▶ row (`run_row.py`)
    weights ─ bucket_layout ─▶ buckets ─────┘

    step           the rule's own program on a clock, in the setting that a run would choose with these times
    update         that step without any communication, less computing: updates that do not hide
    communication  the rest of the step: exchanges that do not hide
    speedup        the step of one node by that rule, same minibatch, over this one
    efficiency     speedup / nodes

Worked example (`docs/planning.md`): 256 images of VGG-A on 16 nodes of 1.67 TFLOP/s with 10 Gbit/s Ethernet.

Where layers can be split (`split_plan.py`), a row with the splits follows the row without, if they are faster. It is
the same prediction, with the tasks of split layers in the program and their buckets in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple

from unisono.plan.bottleneck import StepShares
from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import (
    Candidate,
    PredictionInputs,
    Setting,
    candidates,
    initial_setting,
    is_searched,
    predicted_again,
    space_of,
)
from unisono.plan.exchange_cost import COLLECTIVES_OF_A_SHARD, FREE, ExchangeCost, even_cost, exchange_cost
from unisono.plan.layer_costs import computing_of
from unisono.plan.loading import Loading, held_bytes, least_step, loading_of
from unisono.plan.machines import MachineFacts
from unisono.plan.rank_memory import rank_memory
from unisono.plan.run_row import PlannedStep, RunPlan, row_of
from unisono.plan.run_settings import RunSettings, check_settings, samples_of_node, samples_of_rank, slowest_node
from unisono.plan.simulated_cost import SIMULATED, with_simulated, without_rows
from unisono.plan.split import gradient_bytes, sent_of, with_splits
from unisono.plan.split_plan import WITH_SPLITS, SplitModel, memory_with, split_inputs
from unisono.plan.trace import TracedLayer
from unisono.plan.unequal import Unequal, cost_of, slowed
from unisono.rules import BaseRule
from unisono.step.costs import Cost
from unisono.step.rule import RankState

MAX_BUCKETS = 128
"""Largest number of buckets that a plan tries: a run tries more for a large model, which takes long to play."""

MAX_PLAYED_RANKS = 64
"""Largest number of ranks of a played program: one is played, and others count where they share its updates alone."""


ExchangeOf = Callable[[BaseRule, int], ExchangeCost]
"""Function (rule, number of nodes) -> the cost of the rule's exchanges."""


class PredictedRun(NamedTuple):
    """Prediction for a rule on a number of nodes."""

    rule: BaseRule
    inputs: PredictionInputs
    best: Candidate
    silent: float
    """Seconds of a step in the same setting whose collectives take no time."""
    refused: Mapping[str, str] = MappingProxyType({})
    """Reason for each schedule that could not be simulated."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.best.prediction.step


def plan_run(
    layers: Sequence[TracedLayer], machine: MachineFacts, settings: RunSettings, split: SplitModel | None = None
) -> list[RunPlan]:
    """Return a plan for each rule and number of nodes, in the order of the settings, and where `split` has faster
    splits one with them.

    Raises UsageError for a minibatch smaller than the ranks, a machine without rates, and a rule that has no step.
    """
    check_settings(layers, machine, settings)
    if settings.simulated:  # what was measured between nodes does not count
        machine = without_rows(machine)
    exchange_of = exchanges_of(machine, settings)
    found = list[RunPlan]()
    for words, rule in settings.rules.items():
        alike = replace(settings, slow_nodes={})
        alone = predict_run(layers, machine, alike, rule, 1, exchange_of(rule, 1).cost).step
        alone = max(alone, least_step(alone, 0.0, _loading(machine, settings, 1)))
        rows, split_rows = list[RunPlan](), list[RunPlan]()
        for nodes in settings.nodes:
            cost = exchange_of(rule, nodes)
            run = predict_run(layers, machine, settings, rule, nodes, cost.cost)
            slower = _slower(layers, machine, settings, nodes, cost.cost, run)
            step = _planned_step(layers, machine, settings, words, nodes, cost, run)._replace(slower=slower)
            rows.append(row_of(machine, settings, nodes, step, alone))
            if split is not None and rule.traits.groups and nodes * settings.ranks_per_node > 1:
                faster = _split_step(layers, machine, settings, words, nodes, cost, run, split)
                split_rows += [row_of(machine, settings, nodes, faster, alone)] if faster is not None else []
        found += rows + split_rows
    return found


def exchanges_of(machine: MachineFacts, settings: RunSettings) -> ExchangeOf:
    """Return the function that gives the cost of a rule's exchanges on a number of nodes."""

    @cache
    def cost(nodes: int, wire: str | None, sharded: bool, algorithm: str) -> ExchangeCost:
        return exchange_cost(machine, nodes, settings.ranks_per_node, wire, sharded, algorithm)

    return lambda rule, nodes: cost(nodes, rule.exchange.wire, rule.traits.state is RankState.SHARDED, rule.algorithm)


def _slower(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    nodes: int,
    cost: Cost,
    run: PredictedRun,
) -> str:
    """Return the sentence about the slow link or node that costs most; predict the step without these."""
    rule, unequal = run.rule, Unequal(machine.slow_links, settings.slow_nodes).among(nodes)
    without_links = without_nodes = run.step
    if unequal.links and nodes > 1:
        kind = rule.exchange.wire, rule.traits.state is RankState.SHARDED, rule.algorithm
        even = even_cost(cost, machine, nodes, settings.ranks_per_node, *kind)
        without_links = predict_run(layers, replace(machine, slow_links={}), settings, rule, nodes, even).step
    if unequal.nodes:
        without_nodes = predict_run(layers, machine, replace(settings, slow_nodes={}), rule, nodes, cost).step
    return cost_of(unequal, run.step, without_links, without_nodes)


def predict_run(
    layers: Sequence[TracedLayer], machine: MachineFacts, settings: RunSettings, rule: BaseRule, nodes: int, cost: Cost
) -> PredictedRun:
    """Return the prediction for a rule on `nodes` nodes whose exchanges have this cost, in the setting that a run
    chooses with these times."""
    inputs = inputs_of(layers, machine, settings, rule, nodes, cost)
    best, refused = _best(inputs, nodes * settings.ranks_per_node), dict[str, str]()
    setting = best.setting
    if settings.simulated and nodes > 1:
        best, refused = with_simulated(inputs, setting, machine, nodes, settings.ranks_per_node)
    return PredictedRun(inputs.rule, inputs, best, _silent(inputs, setting), refused)


def inputs_of(
    layers: Sequence[TracedLayer], machine: MachineFacts, settings: RunSettings, rule: BaseRule, nodes: int, cost: Cost
) -> PredictionInputs:
    """Return the inputs of that prediction; a rule that measures its period has the one that hides."""
    ranks = nodes * settings.ranks_per_node
    samples = samples_of_rank(settings, nodes)
    computing = computing_of(layers, machine, settings.traced, samples, settings.ranks_per_node)
    played = min(ranks, MAX_PLAYED_RANKS)
    update = update_seconds(machine, settings) * (played / ranks if rule.traits.state is RankState.SHARDED else 1)
    computing = slowed(replace(computing, update=update), slowest_node(settings, nodes))
    sizes = [layer.parameter_bytes for layer in layers if layer.parameters]
    if rule.traits.state is RankState.SHARDED:  # the sum of flags besides the two that were priced
        cost = cost._replace(latency=cost.latency * COLLECTIVES_OF_A_SHARD / 2)
    buckets, clip = partial(buckets_of, sizes), settings.clip
    return PredictionInputs(rule, computing, buckets, cost, True, played, clip, settings.layer_norms, nodes=nodes)


def _best(inputs: PredictionInputs, ranks: int) -> Candidate:
    """Return the setting that a run on so many ranks chooses, with its prediction."""
    rule = inputs.rule
    if not is_searched(rule) or ranks == 1:
        return predicted_again(initial_setting(rule, inputs.buckets, ranks), inputs)
    overlaps, largest, outstandings = space_of(rule)
    few = [size for size in largest if len(inputs.buckets(size, 1)) <= MAX_BUCKETS] or [max(largest)]
    return candidates(inputs, overlaps, few, outstandings)[0]


def _silent(inputs: PredictionInputs, setting: Setting) -> float:
    """Return the seconds of a step whose exchanges take no time."""
    return predicted_again(setting, inputs._replace(cost=FREE, groups={}, activations=())).prediction.step


def update_seconds(machine: MachineFacts, settings: RunSettings) -> float:
    """Return the seconds to update the weights of a byte of gradients, by memory alone; 0 without its bandwidth.

    An optimizer reads weights, gradients and what it keeps, and writes all but the gradients.
    """
    bandwidth = machine.node.memory_bandwidth
    return (3 + 2 * settings.kept) * settings.ranks_per_node / bandwidth if bandwidth else 0.0


def _loading(machine: MachineFacts, settings: RunSettings, nodes: int) -> Loading:
    return loading_of(machine, settings.samples, samples_of_node(settings, nodes), settings.ranks_per_node)


def _planned_step(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    words: str,
    nodes: int,
    exchange: ExchangeCost,
    run: PredictedRun,
) -> PlannedStep:
    """Return a predicted run by its parts, with the memory of a rank."""
    whole, ranks = run.inputs.computing.whole, nodes * settings.ranks_per_node
    update = max(0.0, run.silent - whole)
    communication = max(0.0, run.step - whole - update)
    held = held_bytes(settings.samples, settings.epoch_samples, nodes, ranks)
    samples = samples_of_rank(settings, nodes)
    memory = rank_memory(layers, settings.traced, samples, ranks, run.rule, settings.kept, held)
    setting, communicating = run.best.setting, run.best.prediction.communicating
    simulated = settings.simulated and nodes > 1
    return PlannedStep(
        words,
        StepShares(whole, communication, update, communicating, run.inputs.cost, _loading(machine, settings, nodes)),
        memory,
        memory.weights / run.rule.traits.period,
        setting.overlap,
        setting.bucket_bytes,
        exchange.schedule,
        run.rule.exchange.wire,
        basis=exchange.basis if run.refused or not simulated else SIMULATED,
        estimated=", ".join(run.refused),
    )


def _split_step(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    words: str,
    nodes: int,
    exchange: ExchangeCost,
    run: PredictedRun,
    model: SplitModel,
) -> PlannedStep | None:
    """Return the step with split layers beside that of `run`, without; None where nothing is split."""
    given = split_inputs(layers, machine, settings, nodes, run.inputs, model)
    splits = model.choose(given)
    if not splits:
        return None
    inputs = with_splits(given, splits)
    best = _best(inputs, inputs.ranks)
    split = PredictedRun(run.rule, inputs, best, _silent(inputs, best.setting))
    step = _planned_step(layers, machine, settings, words, nodes, exchange, split)
    sent = (sent_of(given, layer, splits.get(layer.name)) for layer in given.layers)
    return step._replace(
        rule=words + WITH_SPLITS,
        memory=memory_with(splits, step.memory, given),
        exchanged=sum(one.gradient_bytes + one.activation_bytes for one in sent) / gradient_bytes(1, inputs.ranks, 1),
        split=splits,
        basis=exchange.basis,  # which is not simulated for groups
    )
