"""Plan of split layers that is chosen by prediction, from a short measurement: `plan = "auto"`.

    traced steps on an example          ─▶ bytes of each layer, share of the seconds ┐
    whole steps, without hooks          ─▶ seconds of the passes and of the update   ├▶ plan/split.py ─▶ rank 0's plan,
    two allreduces and two all-gathers  ─▶ latency, seconds a byte                   ┘                   on all ranks

Each rank traces its own example, the ranks at the same time; a step counts as long as on the slowest. A layer stays
whole if some rank did not call it once, or if its weight is read elsewhere too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import PredictionInputs, initial_setting
from unisono.plan.layer_costs import computing_in_order
from unisono.plan.split import (
    GroupLinks,
    LayerFacts,
    LinkCosts,
    SplitInputs,
    choose_splits,
    describe_split,
    gradient_bytes,
    known_links,
)
from unisono.plan.trace import StepSeconds, TracedLayer, time_steps, trace_values
from unisono.rules import BSP, BaseRule
from unisono.step.costs import Cost, fit
from unisono.step.rule import RankState
from unisono.tensor_parallel.layers import KINDS
from unisono.tensor_parallel.norms import LAYERWISE, NEEDS_WHOLE
from unisono.tensor_parallel.pairs import pairs_of
from unisono.tensor_parallel.plan import ParallelPlan, Split, make_plan
from unisono.world import World

Example = Tensor | tuple[Any, ...]
"""Inputs of a model for a batch: a tensor, or the arguments of its `forward`. The first is (samples, ...)."""

ALLREDUCE_BYTES = 1 << 16, 8 << 20
"""Bytes of the two allreduces that are timed: a short and a long bucket of gradients."""

ALL_GATHER_BYTES = 1 << 14, 1 << 20
"""Bytes of the two all-gathers that are timed: as those of activations, shorter than gradients."""

REPETITIONS = 5
"""Times that a step, and each collective, is timed, after one that is not."""

NONE = "layers split by prediction: none"
"""Beginning of a line about a plan that is empty."""


class PlanChoice(NamedTuple):
    """Plan that was chosen, and lines about it for the log."""

    plan: ParallelPlan | None
    """Plan, empty where nothing is split; None where the rule takes none."""
    lines: list[str]


def choose_plan(
    model: nn.Module,
    world: World,
    example: Example,
    cost: Cost | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    deferred: bool = False,
) -> PlanChoice:
    """Return the plan that is predicted to be fastest, the same on all ranks, which call this together.

    `example` is a batch as this rank has it in data parallelism; all ranks' batches together are one step. `cost` is
    that of a collective by the bytes that a rank sends; None: it is measured. `within` gives the context in which the
    model computes, `deferred` is True where gradients are waited for when weights are read, as by a Trainer, not at the
    end of the backward pass. The model stays as it is: a copy is traced. The plan is empty where no split is predicted
    to be faster. Raises UsageError for a model that cannot be copied or traced.
    """
    if world.size == 1:
        return PlanChoice(ParallelPlan(), [f"{NONE}, there is one rank"])
    arguments = example if isinstance(example, tuple) else (example,)
    traces = [trace_values(model, arguments, within()) for _ in range(1 + REPETITIONS)]
    names = [name for name, _ in model.named_modules()]  # ranks' examples may call different modules
    once = [all(name in one.once for one in traces) for name in names]
    steps = [{layer.name: layer for layer in one.layers} for one in traces[1:]]
    traced = torch.tensor([_seconds(steps, name) for name in names], dtype=torch.float64)
    whole = time_steps(model, arguments, within, REPETITIONS, world.barrier)
    seconds, after = of_slowest_rank(traced, whole, world)
    slowest = dict(zip(names, map(tuple, seconds.tolist()), strict=True))
    agreed = world.allreduce(torch.tensor(once, dtype=torch.int64), op="minimum")
    samples = float(world.allreduce(torch.tensor(float(len(arguments[0])), dtype=torch.float64)))
    links = measure_links(world) if cost is None else known_links(world.placement, LinkCosts(cost, cost))

    def choose() -> PlanChoice:
        able = {name for name, all_ranks in zip(names, agreed.tolist(), strict=True) if all_ranks}
        facts = facts_of(model, traces[-1].layers, able, len(arguments[0]), world.size)
        inputs = inputs_of(facts, slowest, samples, links, after, deferred)
        chosen = choose_splits(inputs)
        return PlanChoice(make_plan(chosen.splits), describe_split(chosen, inputs))

    return world.call_on_root(choose)


def of_slowest_rank(traced: Tensor, steps: Sequence[StepSeconds], world: World) -> tuple[Tensor, StepSeconds]:
    """Return the seconds of each layer's passes, (layers, 2), and those of the parts of a whole step.

    The sums are those of whole steps, of the slowest rank; each layer has its mean share of all ranks' traces. The
    largest of each layer would add up to more than any rank takes: another rank is disturbed in each.
    """
    mean = world.allreduce(traced.clone()) / world.size
    largest = world.allreduce(torch.tensor(steps, dtype=torch.float64).median(0).values, op="maximum")
    sums = mean.sum(0)
    return mean * torch.where(sums > 0, largest[:2] / sums, 0.0), StepSeconds(*largest.tolist())


def _seconds(steps: Sequence[Mapping[str, TracedLayer]], name: str) -> tuple[float, float]:
    """Return the seconds of a layer's forward and backward pass, the median of several steps."""
    found = [step.get(name, TracedLayer(name, "")) for step in steps]
    return median(one.forward_seconds for one in found), median(one.backward_seconds for one in found)


def inputs_of(
    facts: tuple[LayerFacts, ...],
    seconds: Mapping[str, tuple[float, ...]],
    samples: float,
    links: GroupLinks,
    after: StepSeconds | None = None,
    deferred: bool = False,
) -> SplitInputs:
    """Return the inputs of the choice, from the seconds of each layer's two passes and of what comes `after` them (pack
    and update of all weights), and from the samples of a step."""
    placement, costs = links.placement, links.gradients
    ranks, (forward, backward) = placement.ranks, ([seconds[one.name][k] for one in facts] for k in range(2))
    with_weights = [number for number, one in enumerate(facts) if one.weights]
    weights = tuple(facts[number].weights for number in with_weights)
    cost = Cost(costs.network.latency, costs.network.per_byte * gradient_bytes(1, ranks, 1))
    computing, buckets = computing_in_order(forward, backward, with_weights), partial(buckets_of, weights)
    if after is not None and weights:
        computing = replace(computing, update=after.update / sum(weights), pack=after.pack / sum(weights))
    step = PredictionInputs(BSP(), computing, buckets, cost, deferred, ranks, nodes=len(placement.nodes))
    setting = initial_setting(step.rule, buckets, ranks)
    numbers = {facts[number].name: place for place, number in enumerate(with_weights)}
    return SplitInputs(facts, step, setting, numbers, weights, samples / ranks, links)


def whole_layers(rule: BaseRule, optimizer: str) -> PlanChoice | None:
    """Return the choice to split nothing where a rule, or an optimizer by its name, needs whole weights; else None."""
    if not rule.traits.groups:
        return PlanChoice(None, [f"{NONE}, {type(rule).__name__} does not take split layers"])
    needs = set(NEEDS_WHOLE) - set(LAYERWISE if rule.traits.state is RankState.SHARDED else ())
    if optimizer.upper() in {name.upper() for name in needs}:
        return PlanChoice(ParallelPlan(), [f"{NONE}, {optimizer} needs whole weights"])
    return None


def measure_link(world: World) -> Cost:
    """Return the cost of an allreduce by the bytes that a rank sends."""
    memory = [torch.zeros(nbytes // 4) for nbytes in ALLREDUCE_BYTES]
    seconds = [_seconds_of(partial(world.allreduce, payload), world) for payload in memory]
    return fit([gradient_bytes(nbytes, world.size, 1) for nbytes in ALLREDUCE_BYTES], seconds)


def measure_gather(world: World) -> Cost:
    """Return the cost of an all-gather by the bytes that a rank sends."""
    sent, seconds = list[float](), list[float]()
    for nbytes in ALL_GATHER_BYTES:
        shard = torch.zeros(nbytes // 4 // world.size)
        whole = torch.zeros(len(shard) * world.size)
        sent.append((world.size - 1) * shard.nbytes)
        seconds.append(_seconds_of(partial(world.all_gather, shard, whole), world))
    return fit(sent, seconds)


def _seconds_of(collective: Callable[[], Any], world: World) -> float:
    """Return the median seconds of a collective on the slowest rank."""
    took = list[float]()
    for _ in range(1 + REPETITIONS):
        world.barrier()
        begun = time.perf_counter()
        collective()
        took.append(time.perf_counter() - begun)
    return float(world.allreduce(torch.tensor(median(took[1:]), dtype=torch.float64), op="maximum"))


def measure_links(world: World) -> GroupLinks:
    """Return the costs of collectives of all ranks, and of those of a node where there are several nodes."""

    def both(measure: Callable[[World], Cost]) -> LinkCosts:
        network = measure(world)
        return LinkCosts(network, measure(world.node_world()) if 1 < world.nodes < world.size else network)

    return GroupLinks(world.placement, both(measure_link), both(measure_gather))


def facts_of(
    model: nn.Module, layers: Sequence[TracedLayer], once: Collection[str], samples: int, ranks: int
) -> tuple[LayerFacts, ...]:
    """Return the facts of a model's layers, traced for `samples` samples.

    `once` has the modules that every rank called once, and whose parameters nothing else read: others stay whole.
    """
    modules, pairs = dict(model.named_modules()), pairs_of(model, once)
    uses = Counter(id(one) for module in modules.values() for one in module.parameters(recurse=False))

    def facts(layer: TracedLayer) -> LayerFacts:
        module = modules[layer.name]
        weights = layer.parameter_bytes if any(one.requires_grad for one in module.parameters()) else 0
        untied = all(uses[id(one)] == 1 for one in module.parameters(recurse=False))
        sizes = _sizes(module, ranks) if weights and layer.name and layer.name in once and untied else {}
        return LayerFacts(
            layer.name,
            weights,
            layer.input_bytes / samples,
            layer.activation_bytes / samples,
            layer.input_requires_grad,
            isinstance(module, nn.Embedding),
            sizes,
            pairs.get(layer.name, ""),
        )

    return tuple(map(facts, layers))


def _sizes(layer: nn.Module, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the sizes of groups that can split a layer, by "column" and "row"; {} where its weight is computed."""
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        return {}
    divisors = [size for size in range(2, ranks + 1) if ranks % size == 0]
    return {
        how: tuple(size for size in divisors if kind.refusal(layer, Split(how, size)) is None)
        for (of, how), kind in KINDS.items()
        if of is type(layer)
    }
