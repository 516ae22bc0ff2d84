"""Choice of the overlap and the buckets of a step, by prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from unisono.plan.order import sequence, sequence_of_halves
from unisono.rules import BaseRule
from unisono.step.costs import Computing, Cost, Costs, Duration, Prediction
from unisono.step.layout import ActivationExchange, Bucket, Layout
from unisono.step.overlaps import OVERLAPS, find_overlap
from unisono.step.predict import predict
from unisono.step.rule import AUTO, Members, RankState

BUCKET_SIZES = tuple(1 << power for power in range(19, 28))
"""Bucket sizes to choose from, in bytes at most: 512 KiB to 128 MiB."""

INITIAL_BUCKET_BYTES = 8 << 20
"""Bucket size in bytes before anything was measured."""

SMALLEST_BUCKET_BYTES = 1 << 10
"""Bucket size in bytes below which none is cut further, for a rule that needs many."""

MEASURED_BUCKET_BYTES = 1 << 19, 8 << 20
"""Bucket sizes in bytes whose exchange gives the cost of a collective: a small and a large one."""

OUTSTANDING = (2, 4)
"""Numbers of collectives at once to choose from, where the overlap has several."""

TIE_RATIO = 1.01
"""Ratio to the best prediction up to which another counts as equal: the simpler overlap then wins."""

BUCKETS_TIE_RATIO = 1.005
"""Ratio to the best prediction of an overlap up to which other buckets count as equal: the fewest then win."""

END_RATIOS = (1, 4, 16)
"""Ratios of the largest bucket to the first and the last to choose from, for a chain between nodes
(`bucket_layout.py`)."""

FINER_BUCKET_RATIO = 4
"""Ratio of a candidate's bucket size to that of its finer variant."""

OVERLAPS_BY_SIMPLICITY = ("none", "chain", "funnel", "concurrent")

Buckets = Callable[[int, int], Sequence[Bucket]]
"""Function (bytes of the largest bucket, its ratio to those at both ends) -> the buckets, in the order in which they
fill."""


class Setting(NamedTuple):
    """Options by which the gradients of a step are exchanged. All ranks have the same."""

    overlap: str
    bucket_bytes: int
    sequence: tuple[int, ...] = ()
    """Order in which the buckets are sent, by number; empty means as they are planned."""
    outstanding: int = OUTSTANDING[0]
    """Largest number of collectives at once, where the overlap has several."""
    halves: tuple[int, ...] = ()
    """Order of the halves of all exchanges, by key, for a sharded rule (`Layout.halves`)."""
    end_ratio: int = END_RATIOS[0]
    """Ratio of the largest bucket to the first and the last."""


class Candidate(NamedTuple):
    """Setting with its predicted times, and the rule and the costs that were played for them."""

    setting: Setting
    prediction: Prediction
    rule: BaseRule
    costs: Costs


class PredictionInputs(NamedTuple):
    """Inputs of a prediction besides the setting."""

    rule: BaseRule
    computing: Computing
    buckets: Buckets
    cost: Cost
    deferred: bool = True
    """True where parameters are waited for when they are read."""
    ranks: int = 1
    """Number of ranks: a sharded rule updates a share of the weights on each."""
    clip: float | None = None
    """Largest norm of all gradients together, for which updates wait."""
    layer_norms: bool = False
    """True where the optimizer's step needs norms of whole layers."""
    nodes: int = 1
    """Number of nodes that the ranks are on."""
    groups: Mapping[tuple[int, ...], Cost] = MappingProxyType({})
    """Cost of an allreduce of ranks that hold the same part of split layers."""
    activations: tuple[tuple[ActivationExchange, Duration], ...] = ()
    """Exchanges of split layers in a step."""


class Space(NamedTuple):
    """Settings to choose from: a rule's own options, or all where it leaves them open."""

    overlaps: tuple[str, ...]
    sizes: tuple[int, ...]
    outstandings: tuple[int, ...]


def space_of(rule: BaseRule) -> Space:
    """Return the settings that a search for this rule goes through."""
    bucket_bytes = rule.exchange.bucket_bytes
    return Space(
        tuple(OVERLAPS) if rule.overlap == AUTO else (rule.overlap,),
        BUCKET_SIZES if bucket_bytes is None else (bucket_bytes,),
        OUTSTANDING if rule.outstanding is None else (rule.outstanding,),
    )


def is_searched(rule: BaseRule) -> bool:
    """Return True where steps are alike, so that their setting is searched: a period has unlike ones, and workers of an
    asynchronous rule are out of step."""
    traits = rule.traits
    return traits.period == 1 and traits.members is Members.ALL


def initial_setting(rule: BaseRule, buckets: Buckets, ranks: int) -> Setting:
    """Return the setting before a search, and of a rule that is not searched: buckets of at most 8 MiB, as many as the
    rule needs where that can be."""
    overlap = ("none" if ranks == 1 else "chain") if rule.overlap == AUTO else rule.overlap
    largest = rule.exchange.bucket_bytes or INITIAL_BUCKET_BYTES
    while rule.exchange.bucket_bytes is None and largest > SMALLEST_BUCKET_BYTES:
        if len(buckets(largest, END_RATIOS[0])) >= rule.traits.buckets:
            break
        largest //= 2
    return Setting(overlap, largest, (), space_of(rule).outstandings[0])


def candidates(
    inputs: PredictionInputs,
    overlaps: Iterable[str] = tuple(OVERLAPS),
    sizes: Iterable[int] = BUCKET_SIZES,
    outstandings: Iterable[int] = OUTSTANDING,
) -> list[Candidate]:
    """Return the best setting of each overlap: its bucket sizes and its number of collectives at once. The fastest
    overlap comes first."""
    sizes, outstandings = sorted(sizes), sorted(outstandings)
    found = [
        _best(
            [
                predicted(inputs, size, name, outstanding, end_ratio)
                for end_ratio in end_ratios(name, sizes, inputs.nodes)
                for outstanding in (outstandings if find_overlap(name).several else outstandings[:1])
                for size in sizes
            ]
        )
        for name in sorted(overlaps, key=OVERLAPS_BY_SIMPLICITY.index)
    ]
    best = min(one.prediction.step for one in found)
    return sorted(found, key=lambda one: max(one.prediction.step, best * TIE_RATIO))


def end_ratios(overlap: str, sizes: Sequence[int], nodes: int) -> tuple[int, ...]:
    """Return the ratios of the largest bucket to those at both ends that an overlap chooses from. A size that is given
    is that of all buckets.

    Small buckets at both ends keep a link busy sooner and longer. On one node there is none: the cores that compute
    also carry the exchange, and each further bucket takes its Python from them.
    """
    return END_RATIOS if overlap == "chain" and len(sizes) > 1 and nodes > 1 else END_RATIOS[:1]


def finer(candidate: Candidate, inputs: PredictionInputs, sizes: Iterable[int] = BUCKET_SIZES) -> Candidate | None:
    """Return the same overlap with buckets a quarter as large; None where `sizes` lacks that, or buckets stay the same.

    Of two sizes with equal predictions `candidates` takes the larger, but long collectives delay others.
    """
    largest, ratio = candidate.setting.bucket_bytes, candidate.setting.end_ratio
    size = largest // FINER_BUCKET_RATIO
    if size not in sizes or len(inputs.buckets(size, ratio)) == len(inputs.buckets(largest, ratio)):
        return None
    return predicted(inputs, size, candidate.setting.overlap, candidate.setting.outstanding, ratio)


def in_equal_buckets(
    candidate: Candidate, inputs: PredictionInputs, sizes: Iterable[int] = BUCKET_SIZES
) -> Candidate | None:
    """Return the same overlap in the best buckets of one size; None where its buckets are so.

    A prediction knows nothing of the work beside a collective, which weighs most on the small ones at both ends.
    """
    if candidate.setting.end_ratio == END_RATIOS[0]:
        return None
    overlap, outstanding = candidate.setting.overlap, candidate.setting.outstanding
    return _best([predicted(inputs, size, overlap, outstanding) for size in sorted(sizes)])


def predicted(
    inputs: PredictionInputs, size: int, overlap: str, outstanding: int, end_ratio: int = END_RATIOS[0]
) -> Candidate:
    """Return a setting with its predicted times.

    Only `chain` with a deferred wait gains from another order than that in which buckets fill.
    """
    computing, buckets = inputs.computing, inputs.buckets(size, end_ratio)
    own_order = inputs.deferred and overlap == "chain"
    order, halves = tuple[int, ...](), tuple[int, ...]()
    if own_order and inputs.rule.traits.state is RankState.SHARDED:
        by_number = sequence_of_halves(computing, buckets, inputs.cost, 1 / inputs.ranks)
        order = tuple(dict.fromkeys(by_number))
        keys = {number: key for key, number in enumerate(order, 1)}
        halves = tuple(keys[number] for number in by_number)
    elif own_order:
        order = sequence(computing, buckets, inputs.cost)
    sent = [buckets[number] for number in order] or buckets
    layout = layout_of(computing, sent, inputs.deferred, inputs.ranks)
    exchanges, durations = zip(*inputs.activations, strict=True) if inputs.activations else ((), ())
    layout = replace(layout, clip=inputs.clip, layer_norms=inputs.layer_norms, halves=halves, activations=exchanges)
    rule = replace(inputs.rule, overlap=overlap, outstanding=outstanding)
    setting = Setting(overlap, size, order, outstanding, halves, end_ratio)
    costs = Costs(layout, computing, inputs.cost, inputs.groups, durations)
    return Candidate(setting, predict(rule, costs), rule, costs)


def predicted_again(setting: Setting, inputs: PredictionInputs) -> Candidate:
    """Return a setting with the times that are predicted from other inputs."""
    return predicted(inputs, setting.bucket_bytes, setting.overlap, setting.outstanding, setting.end_ratio)


def layout_of(computing: Computing, sent: Sequence[Bucket], deferred: bool, ranks: int = 1) -> Layout:
    """Return the layout of buckets that are sent in this order."""
    full = [max(computing.ready[number] for number in one.parameters) for one in sent]
    filled = tuple(1 + place for place in sorted(range(len(sent)), key=full.__getitem__))
    needed = tuple(sorted(range(len(computing.needed)), key=computing.needed.__getitem__))
    return Layout(ranks, len(computing.needed), tuple(sent), filled, needed, deferred=deferred)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest buckets among those that are about the fastest; of such, the largest size,
    then the first."""
    best = min(one.prediction.step for one in candidates)
    near = [one for one in candidates if one.prediction.step <= best * BUCKETS_TIE_RATIO]
    return min(near, key=lambda one: (len(one.costs.layout.buckets), -one.setting.bucket_bytes))
