"""Prediction of a step whose layers are split over model groups, by part.

    groups of p     rest ─ fc1 ── fc2 ─ rest      rest: computed on the samples of the whole group, p times as long
                           └ sent ┘               fc1, fc2: p times the samples, a p-th of the outputs: as long

    step        = computing + gradients + activations
    computing   = seconds of split layers + p times the seconds of all others
    gradients   = what computing does not hide of their exchange: the largest bubble of `overlap.py` (PCL-DNN 3.1)
    activations = their exchange, which is waited for

In groups of p on N ranks a rank sends, for n bytes of an activation of the group's samples and w bytes of weights,

    column     n_y (p - 1) / p forward,   2 n_x (p - 1) / p backward       weights   2 (w / p) (N / p - 1) / (N / p)
    row      2 n_y (p - 1) / p forward,     n_x (p - 1) / p backward       weights of all others   2 w (N - 1) / N

A pair, a column that gives its part and a row that takes it, sends the column's backward and the row's forward alone.
Worked example, 4 ranks, 128 samples, float32, a pair 1,024 ─▶ 4,096 ─▶ 1,024: w = 33.6 MB, n_x = n_y = 64 * 4,096 B in
groups of 2. A rank sends 50.3 MB of gradients in data parallelism; in groups of 2, 16.8 MB and 0.5 MB of activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unisono.plan.model_parallel import LayerShape
from unisono.plan.overlap import Layer, Machine, bubbles
from unisono.step.costs import Cost

COLUMN, ROW = "column", "row"
PAIR = "column gives part", "row takes part"
"""Splits of two layers between which nothing is sent."""

BUCKET_BYTES = 8 << 20
"""Bytes of gradients that share the latency of a collective."""

BACKWARD_SHARE = 2 / 3
"""Share of computing that is the backward pass: two of three products."""


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
    deferred: bool = True
    """True where gradients are waited for when weights are read; False: at the end of the backward pass."""


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


def candidate(inputs: SplitInputs, size: int, splits: Mapping[str, str]) -> SplitCandidate:
    """Return the splits, in groups of `size`, with their prediction."""
    found = [layer_seconds(inputs, layer, splits.get(layer.name), size) for layer in inputs.layers]
    hides = 1.0 if inputs.deferred else BACKWARD_SHARE
    hidden = [Layer(one.computing * hides, one.gradients) for one in found]
    prediction = SplitPrediction(
        sum(one.computing for one in found),
        max(0.0, *bubbles(hidden, Machine(1.0, 1.0))) if hidden else 0.0,
        sum(one.activations for one in found),
        sum(one.gradient_bytes for one in found),
        sum(one.activation_bytes for one in found),
    )
    ordered = {layer.name: splits[layer.name] for layer in inputs.layers if layer.name in splits}
    return SplitCandidate(size, ordered, prediction)


def layer_seconds(inputs: SplitInputs, layer: LayerFacts, words: str | None, size: int) -> SplitPrediction:
    """Return the seconds of one layer, with all of its gradients, in groups of `size`; `words` None: it is whole."""
    ranks, cost = inputs.ranks, inputs.cost
    parts = 1 if words is None else size
    sent = gradient_bytes(layer.weights, ranks, parts)
    gradients = gradient_seconds(layer.weights, ranks, parts, cost)
    calls, exchanged = 0, 0.0
    if words is not None:
        calls, exchanged = activations_of(layer, words, size, inputs.samples * size / ranks)
    activations = calls * cost.latency + exchanged * cost.per_byte
    return SplitPrediction(layer.seconds * size / parts, gradients, activations, sent, exchanged)


def gradient_bytes(weights: float, ranks: int, size: int) -> float:
    """Return the bytes that a rank sends to average the gradients of a layer split over `size` of the ranks."""
    holders = ranks // size
    return 2 * (weights / size) * (holders - 1) / holders


def gradient_seconds(weights: float, ranks: int, size: int, cost: Cost) -> float:
    """Return the seconds of that exchange, with the layer's share of the latency of a bucket."""
    sent = gradient_bytes(weights, ranks, size)
    return sent * cost.per_byte + cost.latency * weights / size / BUCKET_BYTES if sent else 0.0


def activations_of(layer: LayerFacts, words: str, size: int, samples: float) -> tuple[int, float]:
    """Return the collectives of a split layer in a step, and the bytes that a rank sends; `samples` are the group's."""
    form = FORMS[words]
    backward = form.backward if layer.backward else 0
    nbytes = (form.forward * layer.outputs + backward * layer.inputs) * samples * (size - 1) / size
    return bool(form.forward) + bool(backward), nbytes
