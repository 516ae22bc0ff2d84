"""Row of a plan: a predicted step with its loading, its interval, its speedup and its bottleneck.

    predicted step ─┐
    loading ────────┼─▶ step ─▶ speedup over one node, epoch
    error ──────────┘     └──▶ from, to

**Interval** (`docs/planning.md` has its source): no step is below its computing and updates, nor below its loading.

Worked example: 25 ms of computing and 25 ms of communication on 4 nodes: 50 ms, from 47.6 ms to 52.4 ms. With one
node at 100 ms the speedup is 2, the efficiency 50%. If a batch takes 52 ms to decode, the step takes 52 ms, from 52 ms.

**Bottleneck**, as a sentence: memory that is too small, samples that come too late, else the longest of the step's
parts; before it the slow link that costs most. All ranks wait for a slow link: a step of 100 ms that is one of 71 ms
without node 3's slow link loses 29 ms to it.

step   │ computing 12 ms │ communication 30 ms │ update 1 ms │       communication: of its collectives' 36 ms, 30 ms
                                                                     are bytes on links and 6 ms are latency
batch  │ decoding 60 ms ────────────────────────────────────────▶│    starved: decoding 60 ms, a step without it 43 ms

**Wall time** of a job that trains, part by part (sources: `docs/planning.md`), is what a scheduler is asked for:

    │ start │ pack │ tuning │ epoch 0: steps │ test │ checkpoint │ epoch 1: steps │ test │ checkpoint │ ...

Worked example: 100 epochs of 60 steps. A step takes 50 ms: 25 ms of computing, 5 ms of updates, 30 ms of collectives.
Steps take 6,000 * 1.13 * 50 ms = 339 s, tuning adds 5 * (60 - 50) ms + 7 * 5 * 0.15 * 50 ms = 0.31 s. A test has 160
samples on each rank, whose forward passes take 50 ms: 5 s for all. A checkpoint of 200 MB at 100 MB/s takes 2 s, 100 of
them 200 s. With the start that is 20 + 0.31 + 339 + 5 + 200 = 564.31 s, for which 10 minutes are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isclose
from typing import NamedTuple

from unisono.plan.choose import Candidate, PredictionInputs, StepParts, is_searched, parts_of, predicted
from unisono.plan.exchange_cost import FREE
from unisono.plan.layer_costs import product_seconds
from unisono.plan.layer_plan import Split
from unisono.plan.planned_run import PlannedRun, RankMemory, held_bytes, least_step
from unisono.plan.trials import TRIAL_RATIO, steps_per_trial

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
    split: Mapping[str, Split] = field(default_factory=dict)
    """Split of each layer by its name; empty: data parallelism."""
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
    parts, least = parts_with_loading(run, inputs, played)
    step, whole = parts.step, replace(parts, loading=0.0).step
    error = INTERVAL_ERROR * whole if inputs.cost != FREE else 0.0
    row = RunPlan(
        **vars(parts),
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
        wire=run.wire or "float32",
        reading=loading.reading,
        decoding=loading.decoding,
        basis=run.exchange.basis,
    )
    links, capacity = exchanged * inputs.cost.per_byte, run.machine.node.memory_bytes / run.ranks_per_node
    return replace(row, bottleneck=bottleneck(row, links, capacity))


def parts_with_loading(run: PlannedRun, inputs: PredictionInputs, played: Candidate) -> tuple[StepParts, float]:
    """Return the parts of a step that was played, with its loading, and the seconds that it takes at least."""
    silent = predicted(inputs._replace(cost=FREE, groups={}, activations=()), played.setting).prediction.step
    parts = parts_of(inputs.computing.whole, silent, played.prediction.step)
    least = least_step(parts.computing, parts.update, run.loading)
    return replace(parts, loading=max(0.0, least - parts.step)), least


LEAST_COST = 0.01
"""Share of a step from which a slow link is named."""


def bottleneck(row: RunPlan, links: float, capacity: float) -> str:
    """Return the sentence for a row; `links` are the seconds of its collectives that are bytes on links, `capacity` the
    bytes of memory that a rank has (0: not known)."""
    memory, step, rank, why = row.memory.total, row.step, "a rank", ""
    if gathered := row.memory.gathered:  # on rank 0, which has what the others of its node leave
        capacity += (row.ranks / row.nodes - 1) * max(0.0, capacity - row.memory._replace(gathered=0.0).total)
        rank, why = "rank 0", f"; {gathered / 1e9:.3g} GB are states of all ranks, gathered for a checkpoint"
    if capacity and memory > capacity:
        return f"memory: {rank} needs {memory / 1e9:.3g} GB of {capacity / 1e9:.3g} GB{why}"
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


START_SECONDS = 20.0
"""Seconds of a run besides those that follow from it: 6.0 and 6.5 s were measured with one and two ranks on 2 busy
cores (`unisono train digits`, one epoch); three times that is assumed, for imports by many nodes from one disk."""

STEP_MARGIN = 1.13
"""Seconds of a step over those predicted: none of 40 sealed runs took more than 12.2% longer (`benchmarks/foresight`).
A plan's interval has 9 of 10 runs; with its end for each step, 3 of 20 jobs ended 1 to 4% too late."""

DISK_BANDWIDTH = 1e8
"""Bytes per second of checkpoints and packs where the machine file has no disk.bandwidth: a slow disk, assumed."""

MEASURED_STEPS, TRIALS = 5, 7
"""Steps that are measured before there are times to choose by, and settings with a trial (`reducer/tuning.py`)."""

AUTOTUNE_CALLS = 15
"""Calls of each pass of a convolution before the first step: 5 algorithms, once untimed and twice timed."""


class JobSeconds(NamedTuple):
    """Seconds of a job, by part."""

    start: float
    pack: float
    tuning: float
    steps: float
    tests: float
    checkpoints: float

    @property
    def total(self) -> float:
        """Seconds of the whole job."""
        return sum(self)


def job_seconds(run: PlannedRun, plan: RunPlan) -> JobSeconds:
    """Return the seconds of the whole job of a run, on the nodes of `plan`. Its samples of an epoch are known."""
    assert run.epoch_samples is not None
    steps, disk = ceil(run.epoch_samples / run.minibatch), run.machine.disk.bandwidth or DISK_BANDWIDTH
    held = held_bytes(run.samples, run.epoch_samples, plan.nodes, plan.ranks) * run.ranks_per_node
    forward = sum(product_seconds(one, one.forward_flops, run.machine) for one in run.layers) / run.traced
    loading = max(plan.reading, plan.decoding) / plan.samples
    test = ceil(run.test_samples / plan.ranks) * (run.ranks_per_node * forward + loading)
    written = sum(layer.parameter_bytes + layer.gradient_bytes * run.kept for layer in run.layers)
    if gathered := plan.memory.gathered:  # of every rank, beside their mean or anchor
        written = plan.memory.weights + gathered
    came = gathered * (1 - 1 / plan.nodes)  # over the link of rank 0's node
    checkpoint = written / disk + (came / run.machine.link.total_bandwidth if came else 0.0)
    within = (steps - 1) // run.checkpoint_every if run.checkpoint_every else 0
    return JobSeconds(
        START_SECONDS,
        held / disk,
        _tuning(plan, is_searched(run.rule)) + (AUTOTUNE_CALLS * plan.computing if run.autotunes else 0.0),
        run.epochs * steps * plan.step * STEP_MARGIN,
        run.epochs * test,
        run.epochs * (1 + within) * checkpoint,
    )


def slurm_time(seconds: float) -> str:
    """Return a time in whole minutes, rounded up, as Slurm reads it: days-hours:minutes:seconds.

    >>> slurm_time(564.2), slurm_time(86_400 + 3_601)
    ('0-00:10:00', '1-01:01:00')
    """
    minutes = ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _tuning(plan: RunPlan, searched: bool) -> float:
    """Return the seconds that the search in the first steps adds to them."""
    if not searched or plan.ranks == 1:
        return 0.0
    unhidden = plan.computing + plan.update + plan.communicating
    steps = TRIALS * (1 + steps_per_trial(plan.step))
    return MEASURED_STEPS * max(0.0, unhidden - plan.step) + steps * (TRIAL_RATIO - 1) * plan.step
