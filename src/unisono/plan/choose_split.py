"""Choice of the layers to split and of the sizes of their groups, by the predicted step.

    begin           data parallelism                                            40 ms
    most to gain    fc1: row 4                                                  33 ms    kept
    next            fc2 and fc3: column 4 gives part, row 4 takes part          32 ms    kept
    next            conv5: column 4                                             36 ms    not kept

Every layer exchanges for itself, so what it has to gain is known beforehand: the seconds of its gradients in data
parallelism less those of its parts and activations. Whether these seconds are waited for is not: each split is kept if
it makes the predicted step shorter. Layers of the same sizes are split alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from unisono.plan.choose import Candidate
from unisono.plan.split import (
    COLUMN,
    GIVES,
    ROW,
    TAKES,
    LayerFacts,
    SplitInputs,
    describe_borders,
    predict_splits,
    sent_of,
)

WEIGHTS = (8.0, 2.0, 1.0, 0.25)
"""Weights of gradients beside activations, which are waited for, by each of which a plan is made: gradients may hide,
or cost more than their share of a bucket."""

LEAST_GAIN = 1.1
"""Ratio of data parallelism's predicted step to that of a plan from which on layers are split. Predicted steps were off
by up to 7.5% (benchmarks/overlaps), and a split changes what a program has to do."""


class SplitChoice(NamedTuple):
    """Splits with their prediction, beside data parallelism."""

    splits: Mapping[str, str]
    """Split of each layer by its name, in words of a plan; empty: data parallelism."""
    prediction: Candidate
    whole: Candidate
    """Prediction of data parallelism."""


class SplitModel(NamedTuple):
    """Model whose layers can be split."""

    facts: Callable[[int], tuple[LayerFacts, ...]]
    """Function (ranks) -> facts of its layers."""
    choose: Callable[[SplitInputs], Mapping[str, str]] = lambda inputs: choose_splits(inputs).splits
    """Function that returns the splits; by default those that a run would choose."""


_Unit = tuple[float, tuple[LayerFacts, ...], tuple[str, ...]]
"""Gain, in weighed seconds of exchanges, of a layer, or of a pair between which nothing is sent, with its splits."""


def choose_splits(inputs: SplitInputs) -> SplitChoice:
    """Return the splits that are predicted to be fastest; none unless a step is LEAST_GAIN times as fast."""
    whole = predict_splits(inputs, {})
    found = [_kept(inputs, whole, _best_units(inputs, weight)) for weight in WEIGHTS]
    splits, best = min(found, key=lambda one: one[1].prediction.step)
    if whole.prediction.step < LEAST_GAIN * best.prediction.step:
        return SplitChoice({}, whole, whole)
    return SplitChoice({one.name: splits[one.name] for one in inputs.layers if one.name in splits}, best, whole)


def _kept(inputs: SplitInputs, whole: Candidate, units: list[_Unit]) -> tuple[dict[str, str], Candidate]:
    """Return those of the splits that make the predicted step shorter, one after another, all of a kind together."""
    kinds: dict[object, list[_Unit]] = {}
    for unit in units:
        kinds.setdefault((unit[2], *(layer[1:6] for layer in unit[1])), []).append(unit)
    splits, best = dict[str, str](), whole
    for alike in sorted(kinds.values(), key=lambda some: -sum(gain for gain, _, _ in some)):
        more = {one.name: how for _, layers, words in alike for one, how in zip(layers, words, strict=True)}
        found = predict_splits(inputs, splits | more)
        if found.prediction.step < best.prediction.step:
            splits, best = splits | more, found
    return splits, best


def _best_units(inputs: SplitInputs, weight: float) -> list[_Unit]:
    """Return the splits that gain most if a second of gradients counts as `weight` seconds of activations.

    Layers that can be paired are in chains; best[k] has the gain and the splits of a chain's first k layers:

        best[k + 1] = the better of   best[k] and layer k by itself,   best[k - 1] and the pair of layers k - 1 and k
    """
    by_name, followers = {one.name: one for one in inputs.layers}, {one.partner for one in inputs.layers}

    @cache
    def seconds(name: str, words: str | None) -> float:
        sent = sent_of(inputs, by_name[name], words)
        return sent.activations + weight * sent.gradients

    def ending(best: tuple[float, list[_Unit]], *layers: LayerFacts) -> list[tuple[float, list[_Unit]]]:
        gains = {
            words: sum(seconds(one.name, None) - seconds(one.name, how) for one, how in zip(layers, words, strict=True))
            for words in _words(layers)
        }
        return [(best[0] + gain, [*best[1], (gain, layers, words)]) for words, gain in gains.items()]

    found = list[_Unit]()
    for first in inputs.layers:
        chain = [first] if first.name not in followers else []
        while chain and chain[-1].partner:
            chain.append(by_name[chain[-1].partner])
        best: list[tuple[float, list[_Unit]]] = [(0.0, [])]
        for k, layer in enumerate(chain):
            paired = ending(best[k - 1], chain[k - 1], layer) if k else []
            best.append(max([best[k], *ending(best[k], layer), *paired], key=lambda end: end[0]))
        found += best[-1][1]
    return found


def _words(layers: tuple[LayerFacts, ...]) -> list[tuple[str, ...]]:
    """Return the splits of a layer, or those of a pair between whose layers nothing is sent."""
    first, last = layers[0], layers[-1]
    if len(layers) == 1:
        return [(f"{how} {size}",) for how, sizes in first.sizes.items() for size in sizes]
    sizes = [size for size in first.sizes.get(COLUMN, ()) if size in last.sizes.get(ROW, ())]
    return [(f"{COLUMN} {size} {GIVES}", f"{ROW} {size} {TAKES}") for size in sizes]


def describe_split(chosen: SplitChoice, inputs: SplitInputs) -> list[str]:
    """Return lines about the choice, for the log: the plan, and the predictions with and without it."""
    plan = ", ".join(f"{name}: {words}" for name, words in chosen.splits.items())
    steps = [f"with these {_parts(chosen.prediction, inputs, chosen.splits)}"] if chosen.splits else []
    steps.append(f"data parallelism {_parts(chosen.whole, inputs, {})}")
    return [
        f"layers split by prediction: {plan or 'none, data parallelism'}",
        f"a step is predicted to take, {'; '.join(steps)}",
        *([describe_borders(chosen.splits)] if chosen.splits else []),
    ]


def _parts(one: Candidate, inputs: SplitInputs, splits: Mapping[str, str]) -> str:
    sent = [sent_of(inputs, layer, splits.get(layer.name)) for layer in inputs.layers]
    nbytes = sum(layer.gradient_bytes + layer.activation_bytes for layer in sent)
    return (
        f"{one.prediction.step * 1e3:.1f} ms (computing {inputs.step.computing.whole * 1e3:.1f}, waiting "
        f"{one.prediction.waiting * 1e3:.1f}, of that activations {sum(one.activations for one in sent) * 1e3:.1f}; "
        f"a rank sends {nbytes / 1e6:.1f} MB)"
    )
