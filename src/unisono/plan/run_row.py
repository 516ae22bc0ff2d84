"""Row of a plan: a predicted step with its loading, its interval, its speedup and its bottleneck.

    predicted step ─┐
    loading ────────┼─▶ step ─▶ speedup over one node, epoch
    error ──────────┘     └──▶ from, to

**Interval.** Of 25 runs on 2 to 8 emulated hosts that were probed, whose computing was exact, 9 in 10 took at most 4.8%
more or less than predicted (`benchmarks/foresight/calibration`). So that error is one of communication: a step without
any has no interval, and no step is below its computing and updates, nor below its loading.

Worked example: 25 ms of computing and 25 ms of communication on 4 nodes: 50 ms, from 47.6 ms to 52.4 ms. With one
node at 100 ms the speedup is 2, the efficiency 50%. If a batch takes 52 ms to decode, the step takes 52 ms, from 52 ms.

**Bottleneck**, as a sentence: memory that is too small, samples that come too late, else the longest of the step's
parts; before it the slow link that costs most. All ranks wait for a slow link: a step of 100 ms that is one of 71 ms
without node 3's slow link loses 29 ms to it.

step   │ computing 12 ms │ communication 30 ms │ update 1 ms │       communication: of its collectives' 36 ms, 30 ms
                                                                     are bytes on links and 6 ms are latency
batch  │ decoding 60 ms ────────────────────────────────────────▶│    starved: decoding 60 ms, a step without it 43 ms
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isclose

from unisono.plan.choose import Candidate, PredictionInputs, StepParts, parts_of, predicted
from unisono.plan.exchange_cost import FREE
from unisono.plan.loading import least_step
from unisono.plan.planned_run import PlannedRun
from unisono.plan.rank_memory import RankMemory

INTERVAL_ERROR = 0.048
"""Error relative to the predicted step that 9 of 10 runs of `benchmarks/foresight/calibration` do not exceed."""

INTERVAL_SHARE = 0.9
"""Nominal share of runs, 0 to 1, whose step lies in the interval."""


@dataclass(frozen=True, kw_only=True)
class RunPlan(StepParts):
    """Prediction of a run by one rule on a number of nodes. Times are seconds of a step, sizes bytes of a rank."""

    rule: str
    nodes: int
    ranks: int
    samples: int
    """Samples of the rank that has most."""
    overlap: str
    bucket_bytes: int
    schedule: str
    """Schedule of large buckets; empty where nothing goes over a link."""
    communicating: float
    """Seconds in which a collective runs, hidden or not."""
    low: float
    high: float
    speedup: float
    memory: RankMemory
    bottleneck: str
    epoch: float | None
    wire: str = "float32"
    """Number format of gradients between nodes."""
    reading: float = 0.0
    """Seconds in which a node reads the step's samples, beside training."""
    decoding: float = 0.0
    """Seconds in which a node decodes them, beside training."""
    split: Mapping[str, str] = field(default_factory=dict)
    """Split of each layer, by its name, in words of a parallel plan; empty: data parallelism."""
    basis: str = ""
    """Basis of the cost of exchanges (`exchange_cost.BASES`); empty where nothing goes over a link."""

    @property
    def efficiency(self) -> float:
        """Speedup over the number of nodes."""
        return self.speedup / self.nodes


def epoch_seconds(samples: int, minibatch: int, step_seconds: float) -> float:
    """Return the seconds of an epoch: a last smaller minibatch takes a step as well.

    >>> epoch_seconds(1000, 256, 0.5)
    2.0
    """
    return ceil(samples / minibatch) * step_seconds


def row_of(
    run: PlannedRun, inputs: PredictionInputs, played: Candidate, memory: RankMemory, exchanged: float, alone: float
) -> RunPlan:
    """Return the row of a step that was played.

    `exchanged` are bytes of gradients or weights that a step exchanges, by which the inputs' cost counts; `alone` the
    seconds of the step on one node, with its loading.
    """
    setting, loading = played.setting, run.loading
    silent = predicted(inputs._replace(cost=FREE, groups={}, activations=()), setting).prediction.step
    parts = parts_of(inputs.computing.whole, silent, played.prediction.step)
    whole, least = parts.step, least_step(parts.computing, parts.update, loading)
    error, step = INTERVAL_ERROR * whole if inputs.cost != FREE else 0.0, max(whole, least)
    row = RunPlan(
        **vars(replace(parts, loading=step - whole)),
        rule=run.rule_name,
        nodes=run.nodes,
        ranks=run.ranks,
        samples=run.samples_of_rank,
        overlap=setting.overlap,
        bucket_bytes=setting.bucket_bytes,
        schedule=run.exchange.schedule,
        communicating=played.prediction.communicating,
        low=max(least, whole - error),
        high=max(least, whole + error),
        speedup=alone / step,
        memory=memory,
        bottleneck="",
        epoch=None if run.epoch_samples is None else epoch_seconds(run.epoch_samples, run.minibatch, step),
        wire=run.rule.exchange.wire or "float32",
        reading=loading.reading,
        decoding=loading.decoding,
        basis=run.exchange.basis,
    )
    links, capacity = exchanged * inputs.cost.per_byte, run.machine.node.memory_bytes / run.ranks_per_node
    return replace(row, bottleneck=bottleneck(row, links, capacity))


LEAST_COST = 0.01
"""Share of a step from which a slow link is named."""


def bottleneck(row: RunPlan, links: float, capacity: float) -> str:
    """Return the sentence for a row; `links` are the seconds of its collectives that are bytes on links, `capacity` the
    bytes of memory that a rank has (0: not known)."""
    memory, step = row.memory.total, row.step
    if capacity and memory > capacity:
        return f"memory: a rank needs {memory / 1e9:.3g} GB of {capacity / 1e9:.3g} GB"
    largest = max(row.computing, row.communication, row.update)
    starved = isclose(step, max(row.reading, row.decoding))
    if row.loading and (starved or row.loading >= largest):
        return _late(row, starved)
    if largest == row.computing:
        hidden = row.communicating - row.communication
        behind = f"; {_ms(hidden)} of communication hide" if row.communicating else ""
        return f"computing: {largest / step:.0%} of the step{behind}"
    if largest == row.update:
        return f"updates: {largest / step:.0%} of the step wait for memory"
    links = min(links, row.communicating)
    waits = row.communicating - links
    which = "latency" if waits > links else "bandwidth"
    return (
        f"communication, by {which}: {largest / step:.0%} of the step; of {_ms(row.communicating)} "
        f"of collectives {_ms(waits)} are latency"
    )


def slow_link(slow: Mapping[int, float], step: float, without: float) -> str:
    """Return a sentence with the node whose link is slowest, by these factors; "" if that costs the step little.

    `without` are the seconds of a step whose links are all equal.

    >>> slow_link({3: 4.0}, 0.1, 0.071)
    "node 3's link, 4 times slower: 29 ms of the step; without it 1.41 times as fast"
    """
    if step - without < LEAST_COST * step:
        return ""
    node = max(slow, key=lambda one: slow[one])
    others = f" (the slowest of {len(slow)})" if len(slow) > 1 else ""
    return (
        f"node {node}'s link{others}, {slow[node]:g} times slower: {_ms(step - without)} of the step; "
        f"without it {step / without:.3g} times as fast"
    )


def _late(row: RunPlan, starved: bool) -> str:
    """Return the sentence, with the remedy, for a step that waits for samples, or for the cores that decode them."""
    remedy = "more cores, or fewer pixels of a sample"
    if not starved:
        return f"decoding: {row.loading / row.step:.0%} of the step, on the cores that compute: {remedy}"
    part, longest = "decoding", row.decoding
    if row.reading > row.decoding:
        part, longest, remedy = "reading", row.reading, "keep the samples in memory, or take a faster disk"
    return f"starved: {part} takes {_ms(longest)}, a step without it {_ms(row.step - row.loading)}: {remedy}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
