"""Step of a planned run whose layers are split over groups of ranks, where that is predicted to be faster.

    layers, FLOP/s ─▶ seconds, bytes of each layer ┐
    machine ─▶ latency, seconds a byte sent        ┴▶ choose_split.py ─▶ splits ─▶ step, memory of a rank

A run that chooses its layers (`plan="auto"`) measures what stands here on the left, and then goes through the same
functions; so a plan splits what such a run would split, if the machine is as its file says.

    cost of a byte sent     that of a byte of an allreduce, p / (2 (p - 1)) of it: a rank sends 2 (p - 1) / p of them
    communication           activations, which are waited for, and gradients that do not hide
    updates                 of the weights that a rank has
    loading                 of the samples of the whole group, by each of its ranks
    memory of a rank        weights: its parts, and all that is whole; activations: of the samples of the whole group

Worked example: 4 ranks, a pair 1,024 ─▶ 4,096 ─▶ 1,024 in groups of 4, 128 samples. A rank has 8.4 MB of 33.6 MB of
weights and sends none of them; it sends 1.6 MB of activations, and keeps those of all 128 samples.

Known limits: an encoding of gradients between nodes (`--wire`) is not counted in these rows, and outputs that a layer
gives in parts count as whole ones. The error of predicted steps was measured without splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.plan.choose_split import rank_splits
from unisono.plan.exchange_cost import ExchangeCost
from unisono.plan.loading import Loading
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_row import PlannedStep
from unisono.plan.run_settings import RunSettings, samples_of_rank, slowest_node
from unisono.plan.split import (
    BUCKET_BYTES,
    LayerFacts,
    SplitCandidate,
    SplitInputs,
    SplitPrediction,
    gradient_bytes,
    layer_seconds,
)
from unisono.step.costs import Cost

WITH_SPLITS = " + split layers"
"""Words behind those of a rule whose layers are split."""


def fastest_split(inputs: SplitInputs) -> SplitCandidate:
    """Return the splits that a run would choose; of size 1, data parallelism, where none is clearly faster."""
    return rank_splits(inputs)[0]


class SplitModel(NamedTuple):
    """Model whose layers can be split."""

    facts: Callable[[int], tuple[LayerFacts, ...]]
    """Function (ranks) -> facts of its layers, with the seconds of a sample on a whole node."""
    choose: Callable[[SplitInputs], SplitCandidate] = fastest_split
    """Function that returns the splits."""


def split_inputs(settings: RunSettings, nodes: int, cost: Cost, model: SplitModel) -> SplitInputs:
    """Return the inputs of a prediction on `nodes` nodes; `cost` is that of an allreduce by its bytes."""
    ranks, samples = nodes * settings.ranks_per_node, samples_of_rank(settings, nodes)
    scale = samples * settings.ranks_per_node * slowest_node(settings, nodes)
    facts = tuple(one._replace(seconds=one.seconds * scale) for one in model.facts(ranks))
    sent = gradient_bytes(1.0, ranks, 1)
    return SplitInputs(facts, ranks, settings.minibatch, Cost(cost.latency, cost.per_byte / sent if sent else 0.0))


def split_step(
    settings: RunSettings, nodes: int, exchange: ExchangeCost, whole: PlannedStep, model: SplitModel
) -> PlannedStep | None:
    """Return the step with layers split, beside `whole`, that without; None where nothing is split."""
    inputs = split_inputs(settings, nodes, exchange.cost, model)
    chosen = model.choose(inputs)
    if not chosen.splits:
        return None
    parts = [layer_seconds(inputs, one, chosen.splits.get(one.name), chosen.size) for one in inputs.layers]
    share = share_of_weights(inputs.layers, chosen)
    prediction = chosen.prediction
    shares = whole.shares._replace(
        computing=prediction.computing,
        communication=prediction.gradients + prediction.activations,
        update=whole.shares.update * share,
        communicating=_communicating(parts),
        cost=inputs.cost,
        samples=Loading(*(seconds * chosen.size for seconds in whole.shares.samples)),
    )
    weights, gradients, state, anchor, activations, held = whole.memory
    own = RankMemory(
        weights * share, gradients * share, state * share, anchor, activations * chosen.size, held * chosen.size
    )
    return PlannedStep(
        whole.rule + WITH_SPLITS,
        shares,
        own,
        prediction.gradient_bytes + prediction.activation_bytes,
        "chain",
        BUCKET_BYTES,
        exchange.schedule,
        None,
        chosen.words,
    )


def without_splits(rule: str) -> str:
    """Return the words of the rule of a row, without those of split layers."""
    return rule.removesuffix(WITH_SPLITS)


def share_of_weights(layers: Sequence[LayerFacts], chosen: SplitCandidate) -> float:
    """Return the bytes of weights that a rank has, relative to those of the whole model."""
    whole = sum(one.weights for one in layers)
    split = sum(one.weights for one in layers if one.name in chosen.splits)
    return (whole - split + split / chosen.size) / whole if whole else 1.0


def _communicating(parts: Sequence[SplitPrediction]) -> float:
    """Return the seconds in which a collective runs, hidden or not."""
    return sum(one.gradients + one.activations for one in parts)
