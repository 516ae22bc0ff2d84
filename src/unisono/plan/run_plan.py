"""Plan of a run before it starts: for each rule and number of nodes its step, speedup and memory, by prediction.

    layers ─ layer_costs ──▶ needed, ready ─┐
    machine ─ exchange_cost ─▶ a collective ─┼─ choose_rule ─▶ overlap, buckets ─ predict ─▶ step ─▶ speedup, epoch
    weights ─ bucket_layout ─▶ buckets ─────┘

    step           the rule's own program on a clock, in the setting that a run would choose with these times
    update         that step without any communication, less computing: updates that do not hide
    communication  the rest of the step: exchanges that do not hide
    speedup        the step of one node by that rule, same minibatch, over this one
    efficiency     speedup / nodes

Worked example (`docs/planning.md`): 256 images of VGG-A on 16 nodes of 1.67 TFLOP/s with 10 Gbit/s Ethernet.

**Interval.** Steps that a run predicted from measured computing and collectives were off by 7.5% at most, in 24 cases
on 4 and 8 emulated hosts, whose computing was exact (`benchmarks/overlaps`). So that error is one of communication, and
a step with communication is given plus and minus 7.5%, but never below its computing and updates. The interval does not
cover what stands here in place of measurements: computing and memory at the rates of the machine file, and collectives
at their estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

import torch

from unisono.plan.bottleneck import StepShares, bottleneck
from unisono.plan.bucket_layout import plan_memory
from unisono.plan.choose import Candidate, PredictionInputs, initial_setting, is_searched, predicted, space_of
from unisono.plan.choose_rule import rank_rules
from unisono.plan.exchange_cost import FREE, ExchangeCost, exchange_cost
from unisono.plan.layer_costs import computing_of
from unisono.plan.machines import MachineFacts
from unisono.plan.rank_memory import RankMemory, rank_memory
from unisono.plan.run_settings import RunSettings, check_settings
from unisono.plan.scaling import epoch_seconds
from unisono.plan.simulated_cost import with_simulated
from unisono.plan.trace import TracedLayer
from unisono.plan.unequal import Unequal, cost_of, slowed
from unisono.rules import BaseRule
from unisono.step.costs import Cost
from unisono.step.layout import Bucket
from unisono.wires import encoded_share

LARGEST_ERROR = 0.075
"""Largest error of a predicted step in `benchmarks/overlaps`, relative to the measured one."""

FLOAT32_BYTES = 4

MAX_BUCKETS = 128
"""Largest number of buckets that a plan tries: a run tries more for a large model, which takes long to play."""


@dataclass(frozen=True)
class RunPlan:
    """Prediction of a run by one rule on a number of nodes. Times are seconds of a step, sizes bytes of a rank."""

    rule: str
    nodes: int
    ranks: int
    samples: int
    """Samples of the rank that has most."""
    overlap: str
    bucket_bytes: int
    schedule: str
    """Schedule of large buckets; empty where nothing goes over a link."""
    computing: float
    communication: float
    update: float
    communicating: float
    """Seconds in which a collective runs, hidden or not."""
    low: float
    high: float
    speedup: float
    memory: RankMemory
    bottleneck: str
    epoch: float | None
    estimated: str = ""
    """Schedules of buckets whose simulation was refused, so that their seconds are estimates."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.computing + self.communication + self.update

    @property
    def efficiency(self) -> float:
        """Speedup over the number of nodes."""
        return self.speedup / self.nodes


MAX_PLAYED_RANKS = 64
"""Largest number of ranks of a played program: one is played, and others count where they share its updates alone."""


def plan_run(layers: Sequence[TracedLayer], machine: MachineFacts, settings: RunSettings) -> list[RunPlan]:
    """Return a plan for each rule and number of nodes, in the order of the settings.

    Raises UsageError for a minibatch smaller than the ranks, a machine without rates, and a rule that has no step.
    """
    check_settings(layers, machine, settings)
    wanted = {(nodes, rule.exchange.wire) for nodes in settings.nodes for rule in settings.rules.values()}
    costs = {key: exchange_cost(machine, key[0], settings.ranks_per_node, key[1]) for key in sorted(wanted, key=str)}
    found = []
    for words, rule in settings.rules.items():
        alone = predict_run(layers, machine, settings, rule, 1, FREE).step
        for nodes in settings.nodes:
            exchange = costs[nodes, rule.exchange.wire]
            unequal = Unequal(machine.slow_links, settings.slow_nodes).among(nodes)
            run = predict_run(layers, machine, settings, rule, nodes, exchange.cost, unequal.slowest)
            slower = _slower(layers, machine, settings, run, unequal, exchange.cost, nodes)
            found.append(_row(layers, machine, settings, words, nodes, exchange, run, alone, slower))
    return found


def _slower(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    run: PredictedRun,
    unequal: Unequal,
    cost: Cost,
    nodes: int,
) -> str:
    """Return the sentence about the slow link or node that costs most; predict the step without these."""
    rule = run.rule
    without_links = without_nodes = run.step
    if unequal.links and nodes > 1:
        equal = replace(machine, slow_links={})
        even = exchange_cost(equal, nodes, settings.ranks_per_node, rule.exchange.wire).cost
        without_links = predict_run(layers, equal, settings, rule, nodes, even, unequal.slowest).step
    if unequal.nodes:
        without_nodes = predict_run(layers, machine, settings, rule, nodes, cost).step
    return cost_of(unequal, run.step, without_links, without_nodes)


class PredictedRun(NamedTuple):
    """Prediction for a rule on a number of nodes."""

    rule: BaseRule
    """Rule with its period."""
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


def predict_run(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    rule: BaseRule,
    nodes: int,
    cost: Cost,
    slowest: float = 1.0,
) -> PredictedRun:
    """Return the prediction for a rule on `nodes` nodes whose allreduces have this cost, in the setting that a run
    chooses with these times. The slowest node computes `slowest` times as long as the machine's."""
    ranks = nodes * settings.ranks_per_node
    samples = ceil(settings.minibatch / ranks)
    computing = computing_of(layers, machine, settings.traced, samples, settings.ranks_per_node)
    played = min(ranks, MAX_PLAYED_RANKS)
    update = update_seconds(machine, settings) * (played / ranks if rule.sharded else 1)
    computing = slowed(replace(computing, update=update), slowest)
    sizes = [layer.parameter_bytes for layer in layers if layer.parameters]
    if rule.sharded:  # the weights of its all-gathers are not encoded
        share = encoded_share(rule.exchange.wire)
        cost = cost._replace(per_byte=cost.per_byte * (1 + 1 / share) / 2)
    if rule.measures_period:
        rule = rule.with_period(rule.smallest_period(computing.whole, cost.seconds(sum(sizes))))
    inputs = PredictionInputs(
        rule, computing, lambda size: buckets_of(sizes, size), cost, True, played, settings.clip, settings.layer_norms
    )
    if is_searched(rule) and ranks > 1:
        overlaps, largest, outstandings = space_of(rule)
        few = [size for size in largest if len(inputs.buckets(size)) <= MAX_BUCKETS] or [max(largest)]
        best = rank_rules((rule,), inputs, overlaps, few, outstandings)[0].best
    else:
        first = initial_setting(rule, inputs.buckets, ranks)
        best = predicted(inputs, first.bucket_bytes, first.overlap, first.outstanding)
    setting, refused = best.setting, dict[str, str]()
    if settings.simulated and cost != FREE:
        best, refused = with_simulated(inputs, setting, machine, nodes, settings.ranks_per_node)
    silent = predicted(inputs._replace(cost=FREE), setting.bucket_bytes, setting.overlap, setting.outstanding)
    return PredictedRun(rule, inputs, best, silent.prediction.step, refused)


def update_seconds(machine: MachineFacts, settings: RunSettings) -> float:
    """Return the seconds to update the weights of a byte of gradients, by memory alone; 0 without its bandwidth.

    An optimizer reads weights, gradients and what it keeps, and writes all but the gradients.
    """
    bandwidth = machine.node.memory_bandwidth
    return (3 + 2 * settings.kept) * settings.ranks_per_node / bandwidth if bandwidth else 0.0


def buckets_of(sizes: Sequence[int], largest: int) -> list[Bucket]:
    """Return the buckets of layers with these bytes of parameters, whose gradients come in reverse order."""
    lengths = [(-(-nbytes // FLOAT32_BYTES), torch.float32) for nbytes in sizes]
    order = list(reversed(range(len(lengths))))
    return [Bucket(one.nbytes, one.parameters) for one in plan_memory(lengths, order, largest).buckets]


def _row(
    layers: Sequence[TracedLayer],
    machine: MachineFacts,
    settings: RunSettings,
    words: str,
    nodes: int,
    exchange: ExchangeCost,
    run: PredictedRun,
    alone: float,
    slower: str,
) -> RunPlan:
    ranks, whole = nodes * settings.ranks_per_node, run.inputs.computing.whole
    samples = ceil(settings.minibatch / ranks)
    update = max(0.0, run.silent - whole)
    communication = max(0.0, run.step - whole - update)
    step = whole + update + communication
    error = LARGEST_ERROR * step if run.inputs.cost != FREE else 0.0
    memory = rank_memory(layers, settings.traced, samples, ranks, run.rule, settings.kept)
    capacity = machine.node.memory_bytes / settings.ranks_per_node
    shares = StepShares(whole, communication, update, run.best.prediction.communicating, run.inputs.cost)
    longest = bottleneck(shares, memory.weights / run.rule.period, memory.total, capacity)
    return RunPlan(
        rule=words,
        nodes=nodes,
        ranks=ranks,
        samples=samples,
        overlap=run.best.setting.overlap,
        bucket_bytes=run.best.setting.bucket_bytes,
        schedule=exchange.schedule,
        computing=whole,
        communication=communication,
        update=update,
        communicating=run.best.prediction.communicating,
        low=max(whole + update, step - error),
        high=step + error,
        speedup=alone / step,
        memory=memory,
        bottleneck=f"{slower}; {longest}" if slower else longest,
        estimated=", ".join(run.refused),
        epoch=None
        if settings.epoch_samples is None
        else epoch_seconds(settings.epoch_samples, settings.minibatch, step),
    )
