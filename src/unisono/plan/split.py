"""Split layers in the prediction of a step: their exchanges as tasks of its program, with the costs of their groups.

`docs/tensor_parallel.md` has the bytes that a rank sends for a layer, with an example, and how layers and the sizes of
their groups are chosen. A layer in groups of G computes G times the samples and a G-th of the outputs: as long as in
data parallelism, but for the time of its weights. It also gains that of its gradients less its parts and activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import chain
from typing import NamedTuple

from unisono.placement import Partition, Placement, holders_of, model_groups
from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import Candidate, PredictionInputs, Setting, chosen_setting, initial_setting, predicted
from unisono.plan.layer_plan import COLUMN, PART, ROW, ParallelPlan, Split
from unisono.plan.trace import TracedLayer
from unisono.step.costs import FREE, Cost, Duration
from unisono.step.layout import ActivationExchange

WEIGHTS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0)
"""Weights of gradients beside activations: gradients may hide, or cost more than their share of a bucket."""

LEAST_GAIN = 1.1
"""Ratio of data parallelism's predicted step to that of a plan from which on layers are split."""

MAX_COMPARED_BUCKETS = 64
"""Largest number of buckets of a prediction, many of which are made to choose the layers to split."""


@dataclass
class LayerFacts(TracedLayer):
    """Traced layer of a model, in the order of the forward pass, with its splits."""

    splits: tuple[Split, ...] = ()
    """Splits that it can have by itself; empty: it stays whole."""
    partner: str = ""
    """Name of the layer that could take its part; empty: none."""

    def takes_whole(self, split: Split) -> bool:
        """Return True where the split needs its group's whole input: an embedding's numbers, too."""
        return split.how != ROW or self.kind == "Embedding"

    def less(self, ranks: int) -> tuple[float, float]:
        """Return the seconds that each pass is shorter by in groups of that many ranks."""
        return self.forward_of_weights * (1 - 1 / ranks), self.backward_of_weights * (1 - 1 / ranks)


class LinkCosts(NamedTuple):
    """Costs of an allreduce, and of exchanges of activations, by the bytes that a rank sends, where all of a node send
    at once; seconds that either waits, behind computing, for ranks that compute for longer."""

    gradients: Cost
    activations: Cost
    waits: float = 0.0


class GroupLinks(NamedTuple):
    """Links among the ranks of a run, in groups of a size: across nodes, and within a node."""

    placement: Placement
    network: LinkCosts
    node: LinkCosts


@dataclass(frozen=True)
class SplitInputs:
    """Inputs of a prediction besides the splits; `step` is that of data parallelism."""

    layers: tuple[LayerFacts, ...]
    step: PredictionInputs
    scale: float
    """Samples of a rank, for each that was traced."""
    links: GroupLinks

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of each layer's trained parameters by its name, in the order of their numbers in the step program."""
        return {layer.name: layer.gradient_bytes for layer in self.layers if layer.gradient_bytes}

    @cached_property
    def setting(self) -> Setting:
        """Setting in which splits are compared: that with which a run begins, in few enough buckets."""
        first = initial_setting(self.step.rule, self.step.buckets, self.links.placement.ranks)
        return first._replace(bucket_bytes=max(first.bucket_bytes, sum(self.weights.values()) // MAX_COMPARED_BUCKETS))


class LayerSent(NamedTuple):
    """Bytes that a rank sends for a layer in a step, and the seconds of its exchanges, hidden or not."""

    nbytes: float
    gradients: float
    activations: float


def predict_splits(inputs: SplitInputs, splits: Mapping[str, Split]) -> Candidate:
    """Return the predicted step with the splits of layers by name."""
    return predicted(with_splits(inputs, splits), inputs.setting)


def with_splits(inputs: SplitInputs, splits: Mapping[str, Split]) -> PredictionInputs:
    """Return the inputs of the step's prediction with the splits: tasks of activations, buckets of parts, costs."""
    links, counts = inputs.links, [splits[name].ranks if name in splits else 1 for name in inputs.weights]
    holders = {size: holders_of(model_groups(links.placement, size)) for size in set(counts) - {1}}
    costs = {size: allreduce_cost(links, size) for size in holders}
    parts = [-(-nbytes // count) for nbytes, count in zip(inputs.weights.values(), counts, strict=True)]
    exchanges = [*chain(*(_exchanges(inputs, it, splits[it.name]) for it in inputs.layers if it.name in splits))]
    trained = (layer for layer in inputs.layers if layer.gradient_bytes)
    less = [layer.less(count) for layer, count in zip(trained, counts, strict=True)]
    tasks, durations = zip(*exchanges, strict=True) if exchanges else ((), ())
    groups = {ranks: costs[size] for size, partition in holders.items() for ranks in partition}
    unsplit, shorter = inputs.step.costs, inputs.step.costs.computing.shortened(less)
    layout = replace(unsplit.layout, ranks=links.placement.ranks, activations=tasks)
    priced = replace(unsplit, layout=layout, computing=shorter, groups=groups, activations=durations)
    return inputs.step._replace(costs=priced, buckets=partial(buckets_of, parts, counts=counts, holders=holders))


def sent_of(inputs: SplitInputs, layer: LayerFacts, split: Split | None = None) -> LayerSent:
    """Return the bytes and seconds of a layer's own exchanges; `split` None: it is whole."""
    ranks, size = inputs.links.placement.ranks, 1 if split is None else split.ranks
    part = layer.gradient_bytes / size
    cost = inputs.step.costs.collective if size == 1 else allreduce_cost(inputs.links, size)
    buckets = part / inputs.setting.bucket_bytes  # its share of their latency
    exchanges = [] if split is None else _exchanges(inputs, layer, split)
    nbytes = gradient_bytes(layer.gradient_bytes, ranks, size) + sum(exchange.nbytes for exchange, _ in exchanges)
    gradients = cost.latency * buckets + cost.per_byte * part
    return LayerSent(nbytes, gradients, sum(took.seconds for _, took in exchanges))


def gradient_bytes(weights: float, ranks: int, size: int) -> float:
    """Return the bytes that a rank sends to average the gradients of a layer split over `size` of the ranks."""
    return 2 * weights * (1 / size - 1 / ranks)


def _exchanges(inputs: SplitInputs, layer: LayerFacts, split: Split) -> list[tuple[ActivationExchange, Duration]]:
    """Return the exchanges of a split layer in a step; before own samples, their number: one more latency. The ranks of
    a group on one node share what they gather from others, but not what an all-to-all moves."""
    column, size, placement = split.how == COLUMN, split.ranks, inputs.links.placement
    exchanges, groups = list[tuple[ActivationExchange, Duration]](), model_groups(placement, size)
    crowd, most = _crowd(placement, groups), max(map(len, placement.nodes))
    at = [each.name for each in inputs.layers].index(layer.name)  # that of a tied or frozen one is at the one before
    index = max(0, sum(each.gradient_bytes > 0 for each in inputs.layers[: at + 1]) - 1)
    _, cost, waits = inputs.links.network if crowd else inputs.links.node
    x, y = (nbytes * inputs.scale * (size - 1) for nbytes in (layer.input_bytes, layer.activation_bytes))
    into = (x, False) if layer.takes_whole(split) else (x / size, True)
    out_of = (y / size, True) if column else (y, False)
    takes, gives = size > 1 and (column or split.takes != PART), size > 1 and (not column or split.gives != PART)
    for (nbytes, moves), sends, backward, after in (
        (into, takes, False, False),
        (out_of, gives, False, True),
        (out_of, gives, True, False),
        (into, takes and layer.input_requires_grad, True, True),
    ):
        sending = nbytes * cost.per_byte * (most if crowd and moves else crowd or 1)
        latency = (cost.latency + waits) * (1 if backward or after or split.takes == PART else 2)
        took = Duration(latency + sending, sending if crowd or placement.one_node else 0.0)
        exchanges += [(ActivationExchange(index, nbytes, groups, backward, after), took)] if sends else []
    return exchanges


def allreduce_cost(links: GroupLinks, size: int) -> Cost:
    """Return the cost of an allreduce of gradients, by their bytes, of the ranks that hold a part of a layer."""
    holders = holders_of(model_groups(links.placement, size))
    count, crowd = len(holders[0]), _crowd(links.placement, holders)
    cost, _, waits = links.network if crowd else links.node
    per_byte = cost.per_byte * (crowd or 1) * 2 * (count - 1) / count
    return Cost(cost.latency + waits, per_byte) if count > 1 else FREE


@lru_cache(64)
def _crowd(placement: Placement, groups: Partition) -> int:
    """Return the largest number of groups that share the link of a node; 0 where each lies within one."""
    nodes = [{placement.node_of(rank) for rank in ranks} for ranks in groups]
    return max(Counter(chain.from_iterable(nodes)).values()) if any(len(group) > 1 for group in nodes) else 0


class SplitChoice(NamedTuple):
    """Splits with their prediction, beside that of data parallelism, `whole`."""

    splits: ParallelPlan
    """Split of each layer; empty: data parallelism."""
    prediction: Candidate
    whole: Candidate

    def describe(self, inputs: SplitInputs) -> list[str]:
        """Return lines for the log: the plan, and the predictions with and without it."""

        def step(name: str, played: Candidate, splits: Mapping[str, Split]) -> str:
            sent = [sent_of(inputs, layer, splits.get(layer.name)) for layer in inputs.layers]
            nbytes, activations = sum(layer.nbytes for layer in sent), sum(layer.activations for layer in sent)
            return (
                f"{name} {played.prediction.step * 1e3:.1f} ms (computing {played.costs.computing.whole * 1e3:.1f}, "
                f"waiting {played.prediction.waiting * 1e3:.1f}, of that activations {activations * 1e3:.1f}; a rank "
                f"sends {nbytes / 1e6:.1f} MB)"
            )

        steps = [step("with these", self.prediction, self.splits)] if self.splits else []
        return [
            f"layers split by prediction: {str(self.splits) or 'none, data parallelism'}",
            f"a step is predicted to take, {'; '.join([*steps, step('data parallelism', self.whole, {})])}",
            *([describe_borders(self.splits)] if self.splits else []),
        ]


SplitModel = Callable[[int], tuple[tuple[LayerFacts, ...], Mapping[str, Split] | None]]
"""Function (ranks) -> facts of a model's layers, and their splits; None: those that a run would choose."""


def choose_splits(inputs: SplitInputs, unsplit: Candidate | None = None) -> SplitChoice:
    """Return the splits that are predicted to be fastest; none unless a step is LEAST_GAIN times as fast as `unsplit`,
    each in the setting that a run chooses. `unsplit` None: it is predicted as well."""
    plans = [*map(partial(_best, inputs), WEIGHTS)]
    best = min(plans, key=lambda plan: (predict_splits(inputs, plan).prediction.step, len(plan)))
    unsplit = unsplit or chosen_setting(with_splits(inputs, {}))
    split = chosen_setting(with_splits(inputs, best)) if best else unsplit
    slower = unsplit.prediction.step < LEAST_GAIN * split.prediction.step
    return SplitChoice(ParallelPlan(), unsplit, unsplit) if slower else SplitChoice(best, split, unsplit)


def _best(inputs: SplitInputs, weight: float) -> ParallelPlan:
    """Return the splits that gain most if a second of gradients counts as `weight` seconds of activations.

    Layers that can be paired are in chains. The best splits of a chain up to layer k are

        the better of   those up to layer k - 1 and layer k by itself,   those up to layer k - 2 and the pair k - 1, k
    """
    by_name = {layer.name: layer for layer in inputs.layers}
    giver = {layer.partner: layer.name for layer in inputs.layers if layer.partner}
    best: dict[str, tuple[float, dict[str, Split]]] = {"": (0.0, {})}

    @cache
    def seconds(name: str, split: Split | None = None) -> float:
        sent = sent_of(inputs, by_name[name], split)
        return sent.activations + weight * sent.gradients - sum(by_name[name].less(split.ranks if split else 1))

    for name, layer in by_name.items():
        before = giver.get(name, "")
        units = [(before, {name: split}) for split in layer.splits]
        for column in by_name[before].splits if before else ():
            row = Split(ROW, column.ranks)
            if column.how == COLUMN and row in layer.splits:
                pair = {before: replace(column, gives=PART), name: replace(row, takes=PART)}
                units.append((giver.get(before, ""), pair))
        ends = [best[before]]
        for behind, unit in units:
            gain = sum(seconds(member) - seconds(member, split) for member, split in unit.items())
            ends.append((best[behind][0] + gain, best[behind][1] | unit))
        best[name] = max(ends, key=lambda end: end[0])
    chosen = {name: split for one in inputs.layers if not one.partner for name, split in best[one.name][1].items()}
    return ParallelPlan((name, chosen[name]) for name in by_name if name in chosen)


def describe_borders(splits: Mapping[str, Split]) -> str:
    """Return the layers before which the samples of a group are gathered, and after which they are scattered."""
    borders, first = list[str](), ""
    for name, split in splits.items():
        first = first or name
        if split.gives != PART:
            last = "it" if name == first else name
            borders.append(f"samples of {split.ranks} ranks: gathered before {first}, scattered after {last}")
            first = ""
    return "; ".join(borders)
