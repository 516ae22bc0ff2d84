"""Choice of the overlap and the buckets of a step, by prediction, and the order in which buckets are exchanged.

Among the buckets that are ready, the one that the next forward pass needs first goes first. All ranks have to use the
same order, so it is planned, once, from measurements:

    ready from    fc8 |  fc7  |  fc6 a b c d         | conv2 | conv1           (backward: the last layer comes first)
    exchanged     fc8 fc7 fc6a fc6b           conv2  conv1 fc6c fc6d ...
    next forward                                           conv1 conv2 ... fc6 fc7 fc8

A sharded rule exchanges each bucket in two halves (r reduce-scatter, g all-gather), which go by the same rule: what
the link would do later goes where it would be idle:

    exchanged     r8 r7 r6a r6b g6a g7 g8      r2 g2  r1 g1 g6b ...
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from unisono.rules import BaseRule
from unisono.step.costs import Computing, Cost, Costs, Prediction
from unisono.step.layout import Bucket, Layout
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

BUCKET_VARIANTS = (Fraction(1, 4), Fraction(4))
"""Ratios of the bucket size of a setting's variants to its own: finer ones, and coarser ones."""

MAX_BUCKETS = 128
"""Largest number of buckets that a plan tries: a run tries more for a large model, which takes long to play."""

OVERLAPS_BY_SIMPLICITY = ("none", "chain", "funnel", "phases", "concurrent")

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


@dataclass(frozen=True)
class StepParts:
    """Parts of a predicted step, in seconds; each is the part that does not hide behind those before it."""

    computing: float
    communication: float = 0.0
    update: float = 0.0
    loading: float = 0.0
    """Seconds that the step takes longer because of loading; 0 where it was not predicted."""

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.computing + self.communication + self.update + self.loading


class PredictionInputs(NamedTuple):
    """Inputs of a prediction besides the setting."""

    rule: BaseRule
    costs: Costs
    """Costs of its tasks, in a layout that has no buckets yet."""
    buckets: Buckets
    nodes: int = 1
    """Number of nodes that the ranks are on."""


def prediction_inputs(
    rule: BaseRule, computing: Computing, cost: Cost, buckets: Buckets, ranks: int, count: int, /, **layout: Any
) -> PredictionInputs:
    """Return the inputs of a prediction on `ranks` ranks of `count` nodes, with other fields of its layout."""
    costs = Costs(Layout(ranks, len(computing.needed), (), **layout), computing, cost)
    return PredictionInputs(rule, costs, buckets, count)


def overlaps_of(rule: BaseRule) -> tuple[str, ...]:
    """Return the overlaps to choose from: the rule's own, or all where it leaves that open, but for "phases", which
    gained nothing where it was measured (`benchmarks/phases`) and takes communicators for good."""
    return tuple(name for name in OVERLAPS if name != "phases") if rule.overlap == AUTO else (rule.overlap,)


def sizes_of(rule: BaseRule) -> tuple[int, ...]:
    """Return the bucket sizes to choose from: the rule's own, or all where it leaves that open."""
    return BUCKET_SIZES if rule.exchange.bucket_bytes is None else (rule.exchange.bucket_bytes,)


def is_searched(rule: BaseRule) -> bool:
    """Return True where steps are alike, so that their setting is searched: a period has unlike ones, and workers of an
    asynchronous rule are out of step."""
    return rule.traits.period == 1 and rule.traits.members is Members.ALL


def initial_setting(rule: BaseRule, buckets: Buckets, ranks: int) -> Setting:
    """Return the setting before a search, and of a rule that is not searched: buckets of at most 8 MiB, as many as the
    rule needs where that can be."""
    overlap = ("none" if ranks == 1 else "chain") if rule.overlap == AUTO else rule.overlap
    largest = rule.exchange.bucket_bytes or INITIAL_BUCKET_BYTES
    while rule.exchange.bucket_bytes is None and largest > SMALLEST_BUCKET_BYTES:
        if len(buckets(largest, END_RATIOS[0])) >= rule.traits.buckets:
            break
        largest //= 2
    return Setting(overlap, largest, outstanding=rule.outstanding or OUTSTANDING[0])


def chosen_setting(inputs: PredictionInputs) -> Candidate:
    """Return the setting that a run chooses, in at most MAX_BUCKETS buckets, with its prediction."""
    rule, ranks = inputs.rule, inputs.costs.layout.ranks
    if not is_searched(rule) or ranks == 1:
        return predicted(inputs, initial_setting(rule, inputs.buckets, ranks))
    few = [size for size in sizes_of(rule) if len(inputs.buckets(size, 1)) <= MAX_BUCKETS]
    return candidates(inputs, few or sizes_of(rule)[-1:])[0]


def candidates(inputs: PredictionInputs, sizes: Iterable[int] = ()) -> list[Candidate]:
    """Return the best setting of each overlap: its bucket sizes and its number of collectives at once. The fastest
    overlap comes first. The rule's own options are kept; `sizes` are tried in place of all that it allows."""
    rule = inputs.rule
    outstandings = OUTSTANDING if rule.outstanding is None else (rule.outstanding,)
    sizes = sorted(sizes or sizes_of(rule))
    fastest = [
        _best(
            inputs,
            [
                Setting(name, size, outstanding=outstanding, end_ratio=end_ratio)
                for end_ratio in end_ratios(name, sizes, inputs.nodes)
                for outstanding in (outstandings if find_overlap(name).several else outstandings[:1])
                for size in sizes
            ],
        )
        for name in sorted(overlaps_of(rule), key=OVERLAPS_BY_SIMPLICITY.index)
    ]
    best = min(candidate.prediction.step for candidate in fastest)
    return sorted(fastest, key=lambda candidate: max(candidate.prediction.step, best * TIE_RATIO))


def end_ratios(overlap: str, sizes: Sequence[int], nodes: int) -> tuple[int, ...]:
    """Return the ratios of the largest bucket to those at both ends that an overlap chooses from. A size that is given
    is that of all buckets.

    Small buckets at both ends keep a link busy sooner and longer. On one node there is none: the cores that compute
    also carry the exchange, and each further bucket takes its Python from them.
    """
    return END_RATIOS if not find_overlap(overlap).by_main and len(sizes) > 1 and nodes > 1 else END_RATIOS[:1]


def variants(candidate: Candidate, inputs: PredictionInputs) -> Iterator[Candidate]:
    """Yield the same overlap in other buckets, which predictions do not tell apart well: finer ones, coarser ones of
    one size, and the best of one size. None are yielded where the rule has its own size, or where buckets stay the
    same.

    Of two sizes with equal predictions `candidates` takes the larger, but long collectives delay others. Of what each
    bucket costs ranks that share cores, and of the work beside a collective, which weighs most on the small buckets at
    both ends, a prediction knows nothing.
    """
    setting, sizes = candidate.setting, sizes_of(inputs.rule)
    equal = setting._replace(end_ratio=END_RATIOS[0])
    finer, coarser = (int(setting.bucket_bytes * ratio) for ratio in BUCKET_VARIANTS)
    best = [_best(inputs, [equal._replace(bucket_bytes=size) for size in sizes])] if setting != equal else []
    settings = [setting, *(other.setting for other in best)]
    known = [inputs.buckets(each.bucket_bytes, each.end_ratio) for each in settings]
    for other in (setting._replace(bucket_bytes=finer), equal._replace(bucket_bytes=coarser)):
        if other.bucket_bytes in sizes and inputs.buckets(other.bucket_bytes, other.end_ratio) not in known:
            yield predicted(inputs, other)
    yield from best


def predicted(inputs: PredictionInputs, setting: Setting) -> Candidate:
    """Return a setting with its predicted times, and its orders planned anew.

    Only `chain` and `phases` with a deferred wait gain from another order than that in which buckets fill.
    """
    costs, sharded = inputs.costs, inputs.rule.traits.state is RankState.SHARDED
    computing, buckets = costs.computing, inputs.buckets(setting.bucket_bytes, setting.end_ratio)
    order, halves = tuple[int, ...](), tuple[int, ...]()
    if not costs.layout.deferred and not sharded:
        computing = computing.with_update_first(sum(bucket.nbytes for bucket in buckets))
    if costs.layout.deferred and not find_overlap(setting.overlap).by_main:
        share = 1 / costs.layout.ranks if sharded else None
        served = sequence(computing, buckets, costs.collective, share)
        order = tuple(dict.fromkeys(served))
        keys = {index: key for key, index in enumerate(order, 1)}
        halves = () if share is None else tuple(keys[index] for index in served)
    layout = with_buckets(costs.layout, computing, [buckets[index] for index in order] or buckets, halves)
    rule = replace(inputs.rule, overlap=setting.overlap, outstanding=setting.outstanding)
    costs = replace(costs, layout=layout, computing=computing)
    return Candidate(setting._replace(sequence=order, halves=halves), predict(rule, costs), rule, costs)


def parts_of(computing: float, silent: float, step: float) -> StepParts:
    """Return the parts of a predicted step without its loading; `silent` are the seconds of a step whose exchanges take
    no time.

    >>> parts_of(4.0, silent=5.0, step=8.0)
    StepParts(computing=4.0, communication=3.0, update=1.0, loading=0.0)
    """
    update = max(0.0, silent - computing)
    return StepParts(computing, max(0.0, step - computing - update), update)


def sequence(
    computing: Computing, loads: Sequence[Bucket], cost: Cost, updated_share: float | None = None
) -> tuple[int, ...]:
    """Return the order of exchange of these buckets, by number. Whenever an exchange ends, the ready bucket that is
    needed first goes next.

    With `updated_share` each goes in halves, and is there twice: first its reduce-scatter, then its all-gather, which
    is ready when that share of the bucket has been updated. For an all-gather the link waits if that is more urgent
    than what is there, and comes before the end of what is there.
    """
    halves = updated_share is not None
    taken = [cost.seconds(load.nbytes) / (1 + halves) for load in loads]
    due = [min(computing.needed[parameter] for parameter in load.parameters) for load in loads]
    coming = [
        (max(computing.ready[parameter] for parameter in load.parameters), 0, index) for index, load in enumerate(loads)
    ]
    heapq.heapify(coming)
    waiting: list[tuple[float, int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, turn, index = heapq.heappop(coming)
            heapq.heappush(waiting, (due[index], turn, index))
        first, _, index = waiting[0]
        ends = now + taken[index]
        second = coming if halves else ()
        if urgent := [ready for ready, turn, gather in second if turn and due[gather] < first and ready < ends]:
            now = min(urgent)
            continue
        _, turn, index = heapq.heappop(waiting)
        order.append(index)
        now += taken[index]
        if updated_share is not None and not turn:
            heapq.heappush(coming, (now + loads[index].nbytes * computing.update * updated_share, 1, index))
    return tuple(order)


def with_buckets(layout: Layout, computing: Computing, sent: Sequence[Bucket], halves: tuple[int, ...] = ()) -> Layout:
    """Return the layout with buckets that are sent in this order."""
    full = [max(computing.ready[parameter] for parameter in bucket.parameters) for bucket in sent]
    filled = tuple(1 + place for place in sorted(range(len(sent)), key=full.__getitem__))
    needed = tuple(sorted(range(len(computing.needed)), key=computing.needed.__getitem__))
    return replace(layout, buckets=tuple(sent), filled=filled, needed=needed, halves=halves)


def _best(inputs: PredictionInputs, settings: Iterable[Setting]) -> Candidate:
    """Return the setting of an overlap with the fewest buckets among those that are about the fastest; of such, the
    largest size, then the first. Of those that cut the same buckets, which last as long, that one is predicted."""
    distinct = dict[object, Setting]()
    for setting in sorted(settings, key=lambda setting: -setting.bucket_bytes):
        cut = tuple(inputs.buckets(setting.bucket_bytes, setting.end_ratio))
        distinct.setdefault((setting.outstanding, cut), setting)
    predictions = [predicted(inputs, setting) for setting in distinct.values()]
    best = min(candidate.prediction.step for candidate in predictions)
    near = [candidate for candidate in predictions if candidate.prediction.step <= best * BUCKETS_TIE_RATIO]
    return min(near, key=lambda candidate: len(candidate.costs.layout.buckets))
