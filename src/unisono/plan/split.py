"""Choice of the layers to split over model groups, and of the groups' size, by prediction.

    layers        fc1 ─ relu ─ fc2 ─ loss               seconds, bytes of weights and activations of each
    groups of     1 (data parallel)     2        4       each with the splits that are predicted to be fastest
    step          40 ms                 31 ms    35 ms   the shortest is taken; within 1%, the smallest groups

    step        = computing + gradients + activations
    computing   = seconds of split layers + p times the seconds of all others
    gradients   = what computing does not hide of their exchange: the largest bubble of `overlap.py` (PCL-DNN 3.1)
    activations = their exchange, which is waited for

Ranks of a group of p compute what is not split on the samples of the whole group: p times as long. A split layer has
p times the samples and a p-th of the outputs: as long as before. In groups of p on N ranks a rank sends, for n bytes of
an activation of the group's samples and w bytes of weights,

    column     n_y (p - 1) / p forward,   2 n_x (p - 1) / p backward       weights   2 (w / p) (N / p - 1) / (N / p)
    row      2 n_y (p - 1) / p forward,     n_x (p - 1) / p backward       weights of all others   2 w (N - 1) / N

A pair, a column that gives its part and a row that takes it, sends the column's backward and the row's forward alone.
Worked example, 4 ranks, 128 samples, float32, a pair 1,024 ─▶ 4,096 ─▶ 1,024: w = 33.6 MB, n_x = n_y = 64 * 4,096 B in
groups of 2. A rank sends 50.3 MB of gradients in data parallelism; in groups of 2, 16.8 MB and 0.5 MB of activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from unisono.plan.choose import TIE_RATIO
from unisono.plan.model_parallel import LayerShape, best_groups, prefers_model_parallelism
from unisono.plan.overlap import Layer, Machine, bubbles
from unisono.step.costs import Cost

COLUMN, ROW = "column", "row"
PAIR = "column gives part", "row takes part"
"""Splits of two layers between which nothing is sent."""

BUCKET_BYTES = 8 << 20
"""Bytes of gradients that share the latency of a collective."""


class SentForm(NamedTuple):
    """Exchange of a split: 2 for an allreduce, 1 for half of it (all-gather, reduce-scatter), 0 for none."""

    forward: int
    """Exchange of the output."""
    backward: int
    """Exchange of the input's gradient."""


FORMS: Mapping[str, SentForm] = {
    COLUMN: SentForm(1, 2),
    ROW: SentForm(2, 1),
    PAIR[0]: SentForm(0, 2),
    PAIR[1]: SentForm(2, 0),
}
"""Exchanges of each split that is chosen from."""


class LayerFacts(NamedTuple):
    """Facts of a layer of a model, in the order of the forward pass."""

    name: str
    seconds: float
    """Seconds of its forward and backward passes on a rank's own samples in data parallelism."""
    weights: int = 0
    """Bytes of its parameters."""
    inputs: float = 0.0
    """Bytes of its input, a sample."""
    outputs: float = 0.0
    """Bytes of its output, a sample."""
    backward: bool = True
    """True where its input needs a gradient."""
    sizes: Mapping[str, tuple[int, ...]] = {}
    """Sizes of groups that can split it, by "column" and "row"; empty: none can."""
    partner: str = ""
    """Name of the layer that could take its part; empty: none."""
    shape: LayerShape | None = None
    """Sizes for PCL-DNN's criterion; None where it has none."""


class SplitInputs(NamedTuple):
    """Inputs of a prediction besides the splits."""

    layers: tuple[LayerFacts, ...]
    ranks: int
    samples: float
    """Samples of a step, on all ranks."""
    cost: Cost
    """Cost of a collective, by the bytes that a rank sends."""


class SplitPrediction(NamedTuple):
    """Predicted seconds of a step by part, and bytes that a rank sends."""

    computing: float
    gradients: float
    """Seconds of the gradients' exchange that computing does not hide."""
    activations: float
    gradient_bytes: float
    activation_bytes: float

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.computing + self.gradients + self.activations


class SplitCandidate(NamedTuple):
    """Splits in groups of one size, and the prediction for them."""

    size: int
    """Ranks in a group; 1: data parallelism."""
    splits: Mapping[str, str]
    """Split of each layer by its name, in words without the size, in the order of the forward pass."""
    prediction: SplitPrediction

    @property
    def words(self) -> dict[str, str]:
        """Split of each layer in words of a plan, with the size of the groups."""
        return {name: " ".join([how, str(self.size), *flows]) for name, (how, *flows) in self._parsed()}

    def _parsed(self) -> Iterable[tuple[str, list[str]]]:
        return ((name, words.split()) for name, words in self.splits.items())


def rank_splits(inputs: SplitInputs) -> list[SplitCandidate]:
    """Return the best splits for each size of groups, the fastest first; size 1 is data parallelism.

    Within 1% of the fastest the smaller groups are first.
    """
    sizes = [size for size in range(2, inputs.ranks + 1) if inputs.ranks % size == 0]
    found = [candidate(inputs, 1, {}), *(best_of_size(inputs, size) for size in sizes)]
    best = min(one.prediction.step for one in found if one.splits or one.size == 1)
    # a group that splits nothing only computes more
    return sorted(
        (one for one in found if one.splits or one.size == 1),
        key=lambda one: max(one.prediction.step, best * TIE_RATIO),
    )


def best_of_size(inputs: SplitInputs, size: int) -> SplitCandidate:
    """Return the fastest splits found in groups of `size`: options are added and left out while a step gets shorter."""
    options = options_of(inputs.layers, size)
    everything: dict[str, str] = {}
    for option in options:
        everything = {**option, **everything} if everything.keys().isdisjoint(option) else everything
    found = [_improved(candidate(inputs, size, start), inputs, options) for start in ({}, everything)]
    return min(found, key=lambda one: one.prediction.step)


def options_of(layers: Sequence[LayerFacts], size: int) -> list[dict[str, str]]:
    """Return what can be split in groups of `size`, each by itself: pairs, then single layers."""
    rows = {layer.name for layer in layers if size in layer.sizes.get(ROW, ())}
    pairs = [
        {layer.name: PAIR[0], layer.partner: PAIR[1]}
        for layer in layers
        if size in layer.sizes.get(COLUMN, ()) and layer.partner in rows
    ]
    return pairs + [{layer.name: how} for layer in layers for how, sizes in layer.sizes.items() if size in sizes]


def candidate(inputs: SplitInputs, size: int, splits: Mapping[str, str]) -> SplitCandidate:
    """Return the splits, in groups of `size`, with their prediction."""
    samples = inputs.samples * size / inputs.ranks
    computing, exchange = list[Layer](), list[float]()
    calls, activation_bytes = 0, 0.0
    for layer in inputs.layers:
        words = splits.get(layer.name)
        sent = gradient_bytes(layer.weights, inputs.ranks, 1 if words is None else size)
        held = layer.weights / (1 if words is None else size)
        seconds = sent * inputs.cost.per_byte + inputs.cost.latency * held / BUCKET_BYTES if sent else 0.0
        computing.append(Layer(layer.seconds * (size if words is None else 1), seconds))
        exchange.append(sent)
        if words is not None:
            one, sent = activations_of(layer, words, size, samples)
            calls, activation_bytes = calls + one, activation_bytes + sent
    prediction = SplitPrediction(
        sum(layer.computing for layer in computing),
        max(0.0, *bubbles(computing, Machine(1.0, 1.0))) if computing else 0.0,
        calls * inputs.cost.latency + activation_bytes * inputs.cost.per_byte,
        sum(exchange),
        activation_bytes,
    )
    ordered = {layer.name: splits[layer.name] for layer in inputs.layers if layer.name in splits}
    return SplitCandidate(size, ordered, prediction)


def gradient_bytes(weights: float, ranks: int, size: int) -> float:
    """Return the bytes that a rank sends to average the gradients of a layer split over `size` of the ranks."""
    holders = ranks // size
    return 2 * (weights / size) * (holders - 1) / holders


def activations_of(layer: LayerFacts, words: str, size: int, samples: float) -> tuple[int, float]:
    """Return the collectives of a split layer in a step, and the bytes that a rank sends; `samples` are the group's."""
    form = FORMS[words]
    backward = form.backward if layer.backward else 0
    nbytes = (form.forward * layer.outputs + backward * layer.inputs) * samples * (size - 1) / size
    return bool(form.forward) + bool(backward), nbytes


def describe_split(ranked: Sequence[SplitCandidate], inputs: SplitInputs) -> list[str]:
    """Return lines about the choice, for the log: the plan, the predictions by part, PCL-DNN's criterion."""
    chosen = ranked[0]
    plan = ", ".join(f"{name}: {words}" for name, words in chosen.words.items())
    steps = [f"{_name(one)} {_parts(one.prediction)}" for one in ranked]
    shaped = [(layer.name, layer.shape) for layer in inputs.layers if layer.shape is not None and layer.sizes]
    groups = {name: best_groups(shape, inputs.samples, inputs.ranks) for name, shape in shaped}
    wide = [
        f"{name} ({groups[name]} of {inputs.ranks // groups[name]} ranks)"
        for name, shape in shaped
        if prefers_model_parallelism(shape, inputs.samples)
    ]
    return [
        f"layers split by prediction: {plan or 'none, data parallelism'}",
        f"a step is predicted to take, {'; '.join(steps)}",
        f"PCL-DNN's criterion, at {inputs.samples:g} samples a step, prefers groups for: {', '.join(wide) or 'none'}",
    ]


def _improved(start: SplitCandidate, inputs: SplitInputs, options: Sequence[Mapping[str, str]]) -> SplitCandidate:
    """Return splits that no single option makes faster, neither added nor left out."""
    best, before = start, None
    while best is not before:
        before = best
        for option in options:
            splits = _without(best.splits, option, options)
            for changed in ({**splits, **option}, splits):
                if changed != best.splits:
                    other = candidate(inputs, best.size, changed)
                    best = other if other.prediction.step < best.prediction.step else best
    return best


def _without(
    splits: Mapping[str, str], option: Mapping[str, str], options: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """Return the splits without those of an option's layers. The other layer of a pair goes with its partner."""
    gone = set(option)
    for pair in options:
        if len(pair) > 1 and not gone.isdisjoint(pair) and pair.items() <= splits.items():
            gone |= pair.keys()
    return {name: words for name, words in splits.items() if name not in gone}


def _name(one: SplitCandidate) -> str:
    return "data parallelism" if one.size == 1 else f"in groups of {one.size}"


def _parts(prediction: SplitPrediction) -> str:
    return (
        f"{prediction.step * 1e3:.1f} ms (computing {prediction.computing * 1e3:.1f}, gradients "
        f"{prediction.gradients * 1e3:.1f}, activations {prediction.activations * 1e3:.1f}; a rank sends "
        f"{(prediction.gradient_bytes + prediction.activation_bytes) / 1e6:.1f} MB)"
    )
