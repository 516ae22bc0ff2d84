"""Split layers of a planned run: its machine's links for the choice of splits, and the row with them.

    layers, run in data parallelism ┐
    machine ─▶ costs of links       ┴▶ choose_split.py ─▶ splits ─▶ step by `run_plan.py`, memory of a rank

A run that chooses its layers (`plan="auto"`) measures what stands here on the left, and then goes through the same
functions; so a plan splits what such a run would split, if the machine is as its file says.

    cost of a byte sent     that of a byte of an allreduce, p / (2 (p - 1)) of it: a rank sends 2 (p - 1) / p of them;
                            within a node what its rows of one node say, else nothing
    memory of a rank        weights: its parts, and all that is whole; activations: those of its own samples, and what a
                            split layer keeps for its backward pass: the inputs of its group, or its part of them

Known limit: the error of predicted steps was measured without splits.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.plan.choose import PredictionInputs, initial_setting
from unisono.plan.choose_split import SplitModel
from unisono.plan.exchange_cost import exchange_cost, placement_of
from unisono.plan.planned_run import PlannedRun
from unisono.plan.rank_memory import RankMemory
from unisono.plan.split import (
    COLUMN,
    TAKES,
    GroupLinks,
    LinkCosts,
    SplitInputs,
    gradient_bytes,
    size_of,
)
from unisono.step.costs import Cost

MAX_BUCKETS = 64
"""Number of buckets of a prediction, many of which are made for a choice."""

WITH_SPLITS = " + split layers"
"""Words behind those of a rule whose layers are split."""


def split_inputs(run: PlannedRun, step: PredictionInputs, model: SplitModel) -> SplitInputs:
    """Return the inputs of the choice for a step that is predicted in data parallelism.

    Splits are compared in the setting with which a run begins, in at most MAX_BUCKETS buckets.
    """
    nodes, per_node = run.nodes, run.ranks_per_node
    placement = placement_of(run.machine, nodes, per_node)
    with_parameters = [layer for layer in run.layers if layer.parameters]
    weights = tuple(layer.parameter_bytes for layer in with_parameters)
    setting = initial_setting(step.rule, step.buckets, placement.ranks)
    setting = setting._replace(bucket_bytes=max(setting.bucket_bytes, sum(weights) // MAX_BUCKETS))

    def costs(wire: str | None) -> LinkCosts:
        network, node = (exchange_cost(run.machine, count, per_node, wire).cost for count in (nodes, 1))
        return LinkCosts(of_sent(network, nodes * per_node), of_sent(node, per_node))

    links = GroupLinks(placement, costs(step.rule.exchange.wire), costs(None))
    return SplitInputs(
        model.facts(placement.ranks),
        step,
        setting,
        {layer.name: number for number, layer in enumerate(with_parameters)},
        weights,
        run.samples_of_rank,
        links,
    )


def of_sent(cost: Cost, ranks: int) -> Cost:
    """Return the cost of an allreduce of all ranks by the bytes that a rank sends."""
    sent = gradient_bytes(1.0, ranks, 1)
    return Cost(cost.latency, cost.per_byte / sent if sent else 0.0)


def memory_with(splits: Mapping[str, str], whole: RankMemory, inputs: SplitInputs) -> RankMemory:
    """Return the memory of a rank with these splits, from that without."""
    by_name = {layer.name: layer for layer in inputs.layers}
    weights, kept = float(sum(inputs.weights)), 0.0
    for name, words in splits.items():
        layer, size = by_name[name], size_of(words)
        weights -= inputs.weights[inputs.numbers[name]] * (1 - 1 / size)
        whole_input = words.startswith(COLUMN) or layer.gathers
        kept += layer.inputs * inputs.samples * (size if whole_input else TAKES not in words)
    own = {key: getattr(whole, key) * weights / sum(inputs.weights) for key in ("weights", "gradients", "optimizer")}
    return whole._replace(activations=whole.activations + kept, **own)


def without_splits(rule: str) -> str:
    """Return the words of the rule of a row, without those of split layers."""
    return rule.removesuffix(WITH_SPLITS)
