"""Choice of the layers to split over model groups, and of the groups' size, by prediction.

    groups of     1 (data parallel)     2        4       each with the splits that are predicted to be fastest
    step          40 ms                 31 ms    35 ms   the shortest is taken; within 1%, the smallest groups

A step takes as long as its computing, activations and largest bubble (`split.py`). For one bubble that is a sum over
layers, whose best splits are found exactly, in a time linear in the layers; the largest is that of several tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from unisono.plan.choose import TIE_RATIO
from unisono.plan.model_parallel import best_groups, prefers_model_parallelism
from unisono.plan.split import (
    COLUMN,
    PAIR,
    ROW,
    LayerFacts,
    SplitCandidate,
    SplitInputs,
    SplitPrediction,
    candidate,
    layer_seconds,
)

POSITIONS, WEIGHTS = 16, 4
"""Numbers of layers and of weights that the search tries."""

LEAST_GAIN = 1.1
"""Ratio of data parallelism's predicted step to that of a split from which on layers are split. Predicted steps were
off by up to 7.5% (benchmarks/overlaps), and a split changes what a program has to do."""


def rank_splits(inputs: SplitInputs) -> list[SplitCandidate]:
    """Return the best splits for each size of groups, the fastest first; size 1 is data parallelism.

    Data parallelism is first unless a split is predicted to be LEAST_GAIN times as fast. Of splits within 1% of the
    fastest the smaller groups are first.
    """
    sizes = [size for size in range(2, inputs.ranks + 1) if inputs.ranks % size == 0]
    found = [candidate(inputs, 1, {}), *(best_of_size(inputs, size) for size in sizes)]
    counted = {one.size: one.prediction.step * (1 if one.size == 1 else LEAST_GAIN) for one in found}
    able = [one for one in found if one.splits or one.size == 1]  # a group that splits nothing only computes more
    best = min(counted[one.size] for one in able)
    return sorted(able, key=lambda one: max(counted[one.size], best * TIE_RATIO))


def best_of_size(inputs: SplitInputs, size: int) -> SplitCandidate:
    """Return the fastest of the splits in groups of `size` that are best for some weights of computing and gradients.

    Where layer i has the largest bubble, a step takes as long as the gradients up to layer i and the computing behind
    it. Splits may move that to another layer, so weights between are tried, too.
    """
    count = len(inputs.layers)
    positions = range(0, count + 1, max(1, count // POSITIONS))
    weights = [(position, weight / WEIGHTS) for position in positions for weight in range(1, WEIGHTS + 1)]
    seconds = cache(partial(_seconds, inputs, size))
    distinct = {tuple(best_weighed(inputs, size, *one, seconds).items()): None for one in weights}
    found = [candidate(inputs, size, dict(splits)) for splits in distinct]
    return min(found, key=lambda one: one.prediction.step)


def _seconds(inputs: SplitInputs, size: int, number: int, words: str | None) -> SplitPrediction:
    """Return the seconds of layer `number`, split by `words`."""
    return layer_seconds(inputs, inputs.layers[number], words, size)


def best_weighed(
    inputs: SplitInputs,
    size: int,
    position: int,
    weight: float,
    seconds: Callable[[int, str | None], SplitPrediction] | None = None,
) -> dict[str, str]:
    """Return the splits with the least sum over layers of weighed computing and gradients, and of activations.

    Before layer `position`, gradients have `weight` and computing 1 - weight; from it on computing has 1, and gradients
    `weight` in that layer and 0 behind it. Layers that can be paired are in chains; best[k] has the splits of a chain's
    first k layers:

        best[k + 1] = the better of   best[k] and layer k by itself,   best[k - 1] and the pair of layers k - 1 and k
    """
    numbers = {layer.name: number for number, layer in enumerate(inputs.layers)}
    known = seconds or partial(_seconds, inputs, size)

    def cost(layer: LayerFacts, words: str | None) -> float:
        number = numbers[layer.name]
        one = known(number, words)
        computing = one.computing * (1 - weight if number < position else 1)
        return computing + one.gradients * (weight if number <= position else 0) + one.activations

    followers, found = {layer.partner for layer in inputs.layers}, dict[str, str]()
    for first in inputs.layers:
        chain = [first] if first.name not in followers else []
        while chain and chain[-1].partner:
            chain.append(inputs.layers[numbers[chain[-1].partner]])
        best: list[tuple[float, dict[str, str]]] = [(0.0, {})]
        for k, layer in enumerate(chain):
            alone = [None, *(how for how, sizes in layer.sizes.items() if size in sizes)]
            words = min(alone, key=lambda one: cost(layer, one))
            total, splits = best[k]
            both = [(total + cost(layer, words), splits if words is None else {**splits, layer.name: words})]
            if k and size in chain[k - 1].sizes.get(COLUMN, ()) and size in layer.sizes.get(ROW, ()):
                total, splits = best[k - 1]
                total += cost(chain[k - 1], PAIR[0]) + cost(layer, PAIR[1])
                both.append((total, {**splits, chain[k - 1].name: PAIR[0], layer.name: PAIR[1]}))
            best.append(min(both, key=lambda one: one[0]))
        found |= best[-1][1]
    return found


def describe_split(ranked: Sequence[SplitCandidate], inputs: SplitInputs) -> list[str]:
    """Return lines about the choice, for the log: the plan, the predictions by part, PCL-DNN's criterion."""
    chosen = ranked[0]
    plan = ", ".join(f"{name}: {words}" for name, words in chosen.words.items())
    steps = [f"{_name(one)} {_parts(one.prediction)}" for one in ranked]
    shaped = [(layer.name, layer.shape) for layer in inputs.layers if layer.shape is not None and layer.sizes]
    groups = {name: best_groups(shape, inputs.samples, inputs.ranks) for name, shape in shaped}
    preferred = (name for name, shape in shaped if prefers_model_parallelism(shape, inputs.samples))
    wide = ", ".join(f"{name} (G = {groups[name]})" for name in preferred)
    return [
        f"layers split by prediction: {plan or 'none, data parallelism'}",
        f"a step is predicted to take, {'; '.join(steps)}",
        f"PCL-DNN's criterion, at {inputs.samples:g} samples a step, prefers groups for: {wide or 'none'}",
    ]


def _name(one: SplitCandidate) -> str:
    return "data parallelism" if one.size == 1 else f"in groups of {one.size}"


def _parts(prediction: SplitPrediction) -> str:
    return (
        f"{prediction.step * 1e3:.1f} ms (computing {prediction.computing * 1e3:.1f}, gradients "
        f"{prediction.gradients * 1e3:.1f}, activations {prediction.activations * 1e3:.1f}; a rank sends "
        f"{(prediction.gradient_bytes + prediction.activation_bytes) / 1e6:.1f} MB)"
    )
