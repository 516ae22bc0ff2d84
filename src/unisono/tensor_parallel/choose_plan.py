"""Plan of split layers that is chosen by prediction, from a short measurement: `plan = "auto"`.

`docs/tensor_parallel.md` draws what is measured, how rank 0 chooses from it (`plan/split.py`), and what stays whole.
"""

from __future__ import annotations

import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.device import synchronize
from unisono.errors import UsageError
from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import prediction_inputs
from unisono.plan.layer_plan import AUTO, COLUMN, HEADS, ROW, ParallelPlan, PlanLike, Split, make_plan
from unisono.plan.planned_run import computing_in_order
from unisono.plan.split import GroupLinks, LayerFacts, LinkCosts, SplitInputs, SplitModel, allreduce_cost, choose_splits
from unisono.plan.timing import Context, StepSeconds, time_layers, time_steps
from unisono.plan.trace import Trace, TracedLayer, device_of
from unisono.processor import HOST
from unisono.rules import BSP, BaseRule
from unisono.step.costs import Cost, fit
from unisono.tensor_parallel.layouts import SAMPLES, exchange
from unisono.tensor_parallel.model import ELEMENTWISE, check_plan, refusal, split_refusal
from unisono.world import World

Example = Tensor | tuple[Any, ...]
"""Inputs of a model for a batch: a tensor, or the arguments of its `forward`. The first is (samples, ...)."""

Steps = Callable[[Callable[[], None]], Sequence[StepSeconds]]
"""Function that times whole steps, and calls what it is given before each."""

MEASURED_BYTES = 1 << 16, 8 << 20, 1 << 14, 1 << 20
"""Bytes of the collectives that are timed: two allreduces, as of buckets, and two all-gathers, as of activations."""

REPETITIONS = 5
"""Times that a step, and each collective, is timed, after one that is not."""


class PlanChoice(NamedTuple):
    """Plan that was chosen, and lines about it for the log."""

    plan: ParallelPlan | None
    """Plan, empty where nothing is split; None where the rule or the optimizer takes none."""
    lines: list[str]
    inputs: SplitInputs | None = None
    """Inputs of the prediction, with the bytes of this rank's activations; None where nothing was measured."""


def choose_plan(
    model: nn.Module,
    world: World,
    example: Example,
    within: Context = nullcontext,
    deferred: bool = False,
    refused: str = "",
) -> PlanChoice:
    """Return the fastest plan by prediction, the same on all ranks, which call this together; empty: data parallelism.
    `example` is a batch as this rank has it in data parallelism; all ranks' batches together are one step. `within`
    gives the model's context, `deferred` is True where gradients are waited for when weights are read, as by a Trainer.
    `refused` says why nothing is split. A copy is traced; raises UsageError for a model of which that fails."""
    if refused or world.size == 1:
        reason = refused or "there is one rank"
        return PlanChoice(None if refused else ParallelPlan(), [f"layers split by prediction: none, {reason}"])
    arguments = example if isinstance(example, tuple) else (example,)
    trace, traced = time_layers(model, arguments, within, REPETITIONS, lambda able: all(world.all_gather_object(able)))
    timed = partial(time_steps, model, arguments, within, REPETITIONS)
    seconds, after = of_slowest_rank(traced, timed(world.barrier), world)
    sets, samples = zip(*world.all_gather_object((trace.once, len(arguments[0]))), strict=True)
    once = frozenset.intersection(*sets)
    device = device_of(model)
    called = [layer for name, layer in model.named_modules() if name in once and list(layer.parameters(recurse=False))]
    links = measure_links(world, device, partial(seconds_of_call, called or [model], timed, after.forward, world))
    took = {name: took for (name, _), took in zip(model.named_modules(), seconds.tolist(), strict=True)}
    keys = "forward_seconds", "backward_seconds", "forward_of_weights", "backward_of_weights"
    layers = [replace(layer, **dict(zip(keys, took[layer.name], strict=True))) for layer in trace.layers]
    facts = facts_of(model, layers, once, world.size)
    inputs = inputs_of(facts, sum(samples) / world.size / (len(arguments[0]) or 1), links, deferred)
    pack, update = (seconds / (sum(inputs.weights.values()) or 1) for seconds in (after.pack, after.update))
    costs, streams = inputs.step.costs, device.type != HOST
    without_waits = costs.collective._replace(latency=links.network.gradients.latency)
    beside = measure_beside(timed, sum(after), without_waits, world)
    known = replace(costs.computing, update=update, pack=pack, unpack=streams * pack, streams=streams, beside=beside)
    inputs = replace(inputs, step=inputs.step._replace(costs=replace(costs, computing=known)))
    choice = world.call_on_root(partial(choose_splits, inputs))
    return PlanChoice(choice.splits, choice.describe(inputs), inputs)


def of_slowest_rank(traced: Tensor, steps: Sequence[StepSeconds], world: World) -> tuple[Tensor, StepSeconds]:
    """Return the seconds of each layer (`time_layers`), and of the parts of a step on the slowest rank. A layer has its
    mean share in all ranks' traces of that step: the largest of each would add up to more than any rank takes."""
    mean = world.allreduce(traced.clone()) / world.size
    largest = world.allreduce(torch.tensor(steps, dtype=torch.float64).median(0).values, op="maximum")
    scale = torch.where((sums := mean[:, :2].sum(0)) > 0, largest[:2] / sums, 0.0).repeat(2)
    return mean.clamp(min=0).minimum(mean[:, :2].repeat(1, 2)) * scale, StepSeconds(*largest.tolist())


def inputs_of(facts: tuple[LayerFacts, ...], scale: float, links: GroupLinks, deferred: bool = False) -> SplitInputs:
    """Return the inputs of the choice, from the seconds of each layer and a rank's samples for each that was traced."""
    with_weights = [place for place, layer in enumerate(facts) if layer.gradient_bytes]
    forward, backward = [layer.forward_seconds for layer in facts], [layer.backward_seconds for layer in facts]
    computing, cost = computing_in_order(forward, backward, with_weights), allreduce_cost(links, 1)
    buckets, placement = partial(buckets_of, [facts[place].gradient_bytes for place in with_weights]), links.placement
    known = BSP(), computing, cost, buckets, placement.ranks, len(placement.nodes)
    return SplitInputs(facts, prediction_inputs(*known, deferred=deferred), scale, links)


def slowest(seconds: Sequence[float], world: World) -> float:
    """Return the median of a rank's seconds, of the slowest rank."""
    return float(world.allreduce(torch.tensor(seconds, dtype=torch.float64).median(), op="maximum"))


def measure_links(world: World, device: torch.device, seconds: Callable[[Callable[[], object]], float]) -> GroupLinks:
    """Return the costs of collectives of all ranks, and of those of a node where there are several. `seconds` returns
    what a call between layers takes, which waits for ranks that compute for longer."""
    links = list[LinkCosts]()
    for group in [world, world.node_world()] if 1 < world.nodes < world.size else [world]:
        sent = [2 * nbytes * (1 - 1 / group.size) for nbytes in MEASURED_BYTES]
        ops: list[Callable[[], object]] = [partial(group.allreduce, torch.zeros(n // 4)) for n in MEASURED_BYTES[:2]]
        ops += [partial(gather, group, torch.zeros(n // 4 // group.size, device=device)) for n in MEASURED_BYTES[2:]]
        took = [slowest(timeit.repeat(op, group.barrier, number=1, repeat=1 + REPETITIONS)[1:], group) for op in ops]
        cost, waits = fit([each / 2 for each in sent[2:]], took[2:]), max(0.0, seconds(ops[2]) - took[2])
        links.append(LinkCosts(fit(sent[:2], took[:2]), cost, waits))
    return GroupLinks(world.placement, links[0], links[-1])


def gather(world: World, tensor: Tensor) -> None:
    """Gather the tensors of all ranks, to the end."""
    synchronize(exchange(tensor, world, None, SAMPLES).device)


def seconds_of_call(
    modules: Sequence[nn.Module], steps: Steps, alone: float, world: World, call: Callable[[], object]
) -> float:
    """Return what a call behind each module adds to a forward pass of `alone` seconds, each, on the slowest rank."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(lambda *_: call()))  # returns None: outputs stay
        return max(0.0, slowest([step.forward for step in steps(world.barrier)], world) - alone) / len(modules)


def measure_beside(steps: Steps, alone: float, cost: Cost, world: World) -> float:
    """Return the rate of `steps`, and of allreduces, while both run, of that alone, where a step takes `alone` seconds.
    `docs/tensor_parallel.md` draws an example."""
    tensor = torch.zeros(max(1, int(min(MEASURED_BYTES[1], alone / max(cost.per_byte, 1e-12)) / 4)))
    count, begun, sent = max(1, round(alone / cost.seconds(tensor.nbytes))), list[float](), list[Future[Tensor]]()

    def begin() -> None:
        for future in sent:
            future.result()
        begun.append(time.perf_counter())
        sent[:] = [thread.submit(world.allreduce, tensor) for _ in range(count)]

    with ThreadPoolExecutor(1) as thread:
        steps(begin)
    begun.append(time.perf_counter())
    took = slowest([later - before for before, later in pairwise(begun[1:])], world)
    shorter, longer = sorted((alone, count * cost.seconds(tensor.nbytes)))
    return shorter / max(shorter, took - longer + shorter)


def split_model_of(layers: PlanLike | str, size: int, rule: BaseRule, network: nn.Module, traced: Trace) -> SplitModel:
    """Return a traced network as a recipe's plan splits it: as `layers` say, in groups of `size`, or by prediction.
    Raises UsageError where it names layers and the rule takes none; planning, for splits that do not fit."""
    by_hand, refused = (layers or AUTO) != AUTO, refusal(rule)
    if by_hand and refused:
        raise UsageError(f"[parallel] names layers, but {refused}")

    def of_ranks(ranks: int) -> tuple[tuple[LayerFacts, ...], Mapping[str, Split] | None]:
        splits = check_plan(make_plan(layers, size or ranks), network, ranks).splits if by_hand else None
        return facts_of(network, traced.layers, traced.once, ranks), {} if refused else splits

    return of_ranks


def facts_of(model: nn.Module, layers: Iterable[TracedLayer], once: Set[str], ranks: int) -> tuple[LayerFacts, ...]:
    """Return the facts of a model's traced layers. `once` has the modules that every rank called once, and whose
    parameters nothing else read: others stay whole."""
    modules, pairs, facts = dict(model.named_modules()), pairs_of(model, once), list[LayerFacts]()
    uses = Counter(id(weight) for module in modules.values() for weight in module.parameters(recurse=False))
    ways = [Split(how, size) for how in (COLUMN, ROW, HEADS) for size in range(2, ranks + 1) if ranks % size == 0]
    for layer in layers:
        name, module = layer.name, modules[layer.name]
        tied = any(uses[id(weight)] > 1 for weight in module.parameters())
        able = bool(layer.gradient_bytes and name) and name in once and not tied
        splits = tuple(split for split in ways if able and not split_refusal(module, split, ranks))
        facts.append(LayerFacts(**vars(layer), splits=splits, partner=pairs.get(name, "")))
    return tuple(facts)


def pairs_of(model: nn.Module, once: Set[str]) -> dict[str, str]:
    """Return the name of the second layer of each pair, by that of the first. A layer may be in two. `once` has the
    modules that a forward pass calls once, by their own names: others are in no pair."""
    pairs = dict[str, str]()
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential or name not in once or module._forward_hooks:
            continue
        first = ""
        for key, child in zip(module._modules, module, strict=True):  # with those that stand there twice
            path = f"{name}.{key}".lstrip(".")
            alone = path in once and not child._forward_hooks
            if alone and type(child) is nn.Linear:
                pairs |= {first: path} if first else {}
                first = path
            elif not alone or type(child) not in ELEMENTWISE:
                first = ""
    return pairs
