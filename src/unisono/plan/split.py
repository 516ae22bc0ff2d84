"""Split layers in the prediction of a step: their exchanges as tasks of its program, with the costs of their groups.

    4 ranks, their own samples    │ s0  │ s1  │ s2  │ s3  │     in each unsplit layer, forward and backward
    a column layer, groups of 2   │ s0 s1     │ s2 s3     │     all-gather of a group's samples, half of the outputs
    its output, own again         │ s0  │ s1  │ s2  │ s3  │     all-to-all; nothing where a row layer takes the parts

A layer in groups of G computes G times the samples and a G-th of the outputs: as long as in data parallelism. With x
and y bytes of its input and output on a rank's own samples, w bytes of weights, N ranks, a rank sends

              before the products        behind them                weights     2 (w / G) (N / G - 1) / (N / G)
    column    x (G - 1)                  y (G - 1) / G              whole ones  2 w (N - 1) / N
    row       x (G - 1) / G              y (G - 1)

forward, and the same backward, in reverse order: nothing for y where it "gives part" (column), for x where it "takes
part" (row) or needs no gradient (backward). Tasks that send activations keep computing waiting; those of gradients hide
behind it. So the step is what `step/predict.py` plays.

Worked example, 4 ranks with 32 samples each, float32, a pair 1,024 ─▶ 4,096 ─▶ 1,024 in groups of 2: w = 33.6 MB, x of
the first and y of the second are 32 * 4,096 B = 0.13 MB. A rank sends 16.8 MB of gradients in place of 50.3 MB, and 4
times 0.13 MB of activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple

from unisono.placement import Partition, Placement, holders_of, model_groups
from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import Candidate, PredictionInputs, Setting, predicted_again
from unisono.step.costs import Cost, Duration
from unisono.step.layout import ActivationExchange

COLUMN, ROW = "column", "row"
GIVES, TAKES = "gives part", "takes part"


class LayerFacts(NamedTuple):
    """Facts of a layer of a model, in the order of the forward pass."""

    name: str
    weights: int = 0
    """Bytes of its parameters."""
    inputs: float = 0.0
    """Bytes of its input, a sample."""
    outputs: float = 0.0
    """Bytes of its output, a sample."""
    backward: bool = True
    """True where its input needs a gradient."""
    gathers: bool = False
    """True where a row layer needs its group's whole input: the numbers of an embedding."""
    sizes: Mapping[str, tuple[int, ...]] = {}
    """Sizes of groups that can split it, by "column" and "row"; empty: none can."""
    partner: str = ""
    """Name of the layer that could take its part; empty: none."""


class LinkCosts(NamedTuple):
    """Costs of a collective by the bytes that a rank sends, where all ranks of a node send at once."""

    network: Cost
    node: Cost
    """Cost within a node."""


class GroupLinks(NamedTuple):
    """Links among the ranks of a run, in groups of a size."""

    placement: Placement
    gradients: LinkCosts
    activations: LinkCosts


class SplitInputs(NamedTuple):
    """Inputs of a prediction besides the splits."""

    layers: tuple[LayerFacts, ...]
    step: PredictionInputs
    """Step in data parallelism."""
    setting: Setting
    numbers: Mapping[str, int]
    """Number of each layer's parameters in the step program, by the layer's name."""
    weights: tuple[int, ...]
    """Bytes of parameters, by these numbers."""
    samples: float
    """Samples of a rank."""
    links: GroupLinks


class LayerSent(NamedTuple):
    """Bytes that a rank sends for a layer in a step, and their seconds, hidden or not."""

    gradient_bytes: float
    gradients: float
    activation_bytes: float
    activations: float


Placed = tuple[ActivationExchange, Duration]


def predict_splits(inputs: SplitInputs, splits: Mapping[str, str]) -> Candidate:
    """Return the predicted step with the splits, given by layer in words such as "column 2 gives part"."""
    return predicted_again(inputs.setting, with_splits(inputs, splits))


def with_splits(inputs: SplitInputs, splits: Mapping[str, str]) -> PredictionInputs:
    """Return the inputs of the step's prediction with the splits: tasks of activations, buckets of parts, costs."""
    step, links = inputs.step, inputs.links
    counts, exchanges = [1] * len(inputs.weights), list[Placed]()
    for layer in inputs.layers:
        if (words := splits.get(layer.name)) is not None:
            counts[inputs.numbers[layer.name]] = size_of(words)
            exchanges += _exchanges(inputs, layer, words)
    holders = {size: holders_of(_groups(links.placement, size)) for size in set(counts) - {1}}
    costs = {size: allreduce_cost(links, size) for size in holders}
    parts = [-(-nbytes // count) for nbytes, count in zip(inputs.weights, counts, strict=True)]
    return step._replace(
        buckets=partial(buckets_of, parts, counts=counts, holders=holders),
        ranks=links.placement.ranks,
        groups={ranks: costs[size] for size, partition in holders.items() for ranks in partition},
        activations=tuple(exchanges),
    )


def sent_of(inputs: SplitInputs, layer: LayerFacts, words: str | None = None) -> LayerSent:
    """Return the bytes and seconds of a layer's own exchanges; `words` None: it is whole."""
    ranks, size = inputs.links.placement.ranks, 1 if words is None else size_of(words)
    part = layer.weights / size
    cost = inputs.step.cost if size == 1 else allreduce_cost(inputs.links, size)
    buckets = part / inputs.setting.bucket_bytes  # its share of their latency
    found = [] if words is None else _exchanges(inputs, layer, words)
    return LayerSent(
        gradient_bytes(layer.weights, ranks, size),
        cost.latency * buckets + cost.per_byte * part,
        sum(one.nbytes for one, _ in found),
        sum(took.seconds for _, took in found),
    )


def size_of(words: str) -> int:
    """Return the size of the groups that a split names.

    >>> size_of("column 4 gives part")
    4
    """
    return int(words.split()[1])


def describe_borders(splits: Mapping[str, str]) -> str:
    """Return the layers before which the samples of a group are gathered, and after which they are scattered.

    >>> describe_borders({"fc1": "column 4 gives part", "fc2": "row 4 takes part"})
    'samples of 4 ranks: gathered before fc1, scattered after fc2'
    """
    found, first = list[str](), ""
    for name, words in splits.items():
        first = first or name
        if GIVES not in words:
            last = "it" if name == first else name
            found.append(f"samples of {size_of(words)} ranks: gathered before {first}, scattered after {last}")
            first = ""
    return "; ".join(found)


def gradient_bytes(weights: float, ranks: int, size: int) -> float:
    """Return the bytes that a rank sends to average the gradients of a layer split over `size` of the ranks."""
    holders = ranks // size
    return 2 * (weights / size) * (holders - 1) / holders


def _exchanges(inputs: SplitInputs, layer: LayerFacts, words: str) -> list[Placed]:
    """Return the exchanges of a split layer in a step."""
    column, size = words.startswith(COLUMN), size_of(words)
    gathered, moved = inputs.samples * (size - 1), inputs.samples * (size - 1) / size

    def both(nbytes: float, moves: bool, passes: list[bool], after: bool) -> list[Placed]:
        took = _duration(inputs.links, size, nbytes, moves)
        groups, number = _groups(inputs.links.placement, size), inputs.numbers[layer.name]
        return [(ActivationExchange(number, nbytes, groups, one, after != one), took) for one in passes]

    into = (layer.inputs * gathered, False) if column or layer.gathers else (layer.inputs * moved, True)
    out_of = (layer.outputs * moved, True) if column else (layer.outputs * gathered, False)
    takes, gives = column or TAKES not in words, not column or GIVES not in words
    found = both(*into, [False, True][: 1 + layer.backward], after=False) if takes and size > 1 else []
    found += both(*out_of, [False, True], after=True) if gives and size > 1 else []
    return sorted(found, key=lambda one: (one[0].backward, one[0].after))


def allreduce_cost(links: GroupLinks, size: int) -> Cost:
    """Return the cost of an allreduce of gradients, by their bytes, of the ranks that hold a part of a layer."""
    holders = holders_of(_groups(links.placement, size))
    cost, times = links.gradients.node, 1
    if crowd := _crowd(links.placement, holders):
        cost, times = links.gradients.network, crowd
    count = len(holders[0])
    return Cost(cost.latency, cost.per_byte * times * 2 * (count - 1) / count) if count > 1 else Cost(0.0, 0.0)


def _duration(links: GroupLinks, size: int, nbytes: float, moves: bool) -> Duration:
    """Return the duration of an exchange in groups of `size`: half the messages of an allreduce.

    The ranks of a group on one node share what they gather from others, but not what an all-to-all `moves`.
    """
    crowd, cost = _crowd(links.placement, _groups(links.placement, size)), links.activations.node
    if crowd:
        cost, crowd = links.activations.network, max(map(len, links.placement.nodes)) if moves else crowd
    sending = nbytes * cost.per_byte * max(crowd, 1)
    return Duration(cost.latency / 2 + sending, sending if crowd or links.placement.one_node else 0.0)


@lru_cache(64)
def _groups(placement: Placement, size: int) -> Partition:
    """Return all ranks in groups of `size`."""
    return model_groups(placement, size)


@lru_cache(64)
def _crowd(placement: Placement, groups: Partition) -> int:
    """Return the largest number of groups that share the link of a node; 0 where each lies within one."""
    nodes = [{placement.node_of(rank) for rank in ranks} for ranks in groups]
    within = all(len(one) == 1 for one in nodes)
    return 0 if within else max(Counter(node for one in nodes for node in one).values())
