"""Plan of a run before it starts: on each number of nodes its step, speedup and memory, by prediction.

    layers ─ computing_of ─▶ needed, ready ─┐
    machine ─ exchange_cost ─▶ a collective ─┼─── choose ────▶ overlap, buckets ─ predict ─▶ step ─▶ row
    weights ─ bucket_layout ─▶ buckets ─────┘

`docs/planning.md` has the parts of a step; its update is that step without any communication, less computing.

Where layers can be split, a row with the splits follows the rows without, if they are faster. It is the same
prediction, with the tasks of split layers in the program (`split.py`) and their buckets in parts:

    cost of a byte sent     that of a byte of an allreduce, p / (2 (p - 1)) of it: a rank sends 2 (p - 1) / p of them;
                            within a node what its rows of one node say, else nothing

A run that chooses its layers (`plan="auto"`) measures what stands on the left, and then goes through the same
functions.

**Interval** (`docs/planning.md` has its source): no step is below its computing and updates, nor below its loading.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, isclose

from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import (
    MEASURED_BUCKET_BYTES,
    Candidate,
    PredictionInputs,
    StepParts,
    chosen_setting,
    parts_of,
    predicted,
    prediction_inputs,
)
from unisono.plan.collective_costs import exchange_cost, placement_of, uneven_of
from unisono.plan.layer_plan import Split
from unisono.plan.loading import least_step
from unisono.plan.machines import NodeFacts
from unisono.plan.planned_run import PlannedRun, RankMemory, check_run, computing_of, memory_with, rank_memory
from unisono.plan.split import (
    LEAST_GAIN,
    GroupLinks,
    LayerFacts,
    LinkCosts,
    SplitInputs,
    choose_splits,
    gradient_bytes,
    sent_of,
    with_splits,
)
from unisono.step.costs import FREE, Cost, fit
from unisono.step.rule import RankState

INTERVAL_ERROR = 0.048
"""Error relative to the predicted step that 9 of 10 runs of `benchmarks/foresight/calibration` do not exceed."""

INTERVAL_SHARE = 0.9
"""Nominal share of runs, 0 to 1, whose step lies in the interval."""

MAX_PLAYED_RANKS = 64
"""Largest number of ranks of a played program: one is played, and others count where they share its updates alone."""

WITH_SPLITS = " + split layers"
"""Words behind those of a rule whose layers are split."""

LEAST_SHOWN = 1e-6
"""Seconds from which parts of a step are shown: less is an error of rounding."""

LEAST_COST = 0.01
"""Share of a step from which a slow link is named."""


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
    """Basis of the cost of exchanges (`collective_costs.BASES`); empty where nothing goes over a link."""

    @property
    def efficiency(self) -> float:
        """Speedup over the number of nodes."""
        return self.speedup / self.nodes


def plan_run(run: PlannedRun, nodes: Sequence[int]) -> list[RunPlan]:
    """Return a row for each number of nodes, and behind them one with split layers for each where these are faster.

    Raises UsageError as `check_run`.
    """
    check_run(replace(run, nodes=max(nodes)))
    alone = _alone(run)
    rows, split_rows = list[RunPlan](), list[RunPlan]()
    for here in (replace(run, nodes=count) for count in nodes):
        row, inputs, played = predict_run(here, alone)
        rows.append(row)
        split_rows += _with_split_layers(here, row, inputs, played, alone)
    return rows + split_rows


def predict_run(run: PlannedRun, alone: float | None = None) -> tuple[RunPlan, PredictionInputs, Candidate]:
    """Return the row of a run whose layers are whole, in the setting that it chooses with these times, and what was
    played for it.

    `alone` are the seconds of that step on one node, with its loading; None: they are predicted as well. Raises
    UsageError as `check_run`.
    """
    check_run(run)
    inputs, played = predict_step(run, run.exchange.cost)
    memory = rank_memory(run)
    exchanged = memory.gradients / run.rule.traits.period
    row = row_of(run, inputs, played, memory, exchanged, _alone(run) if alone is None else alone)
    slow = uneven_of(run.machine, run.nodes).slow_nodes if run.nodes > 1 else {}
    without = predict_step(run, even_cost(run))[1].prediction.step if slow else 0.0
    if slow and (sentence := slow_link(slow, played.prediction.step, without)):
        row = replace(row, bottleneck=f"{sentence}; {row.bottleneck}")
    return row, inputs, played


def predict_step(run: PlannedRun, cost: Cost) -> tuple[PredictionInputs, Candidate]:
    """Return the inputs of the prediction and the step where exchanges have this cost."""
    inputs = inputs_of(run, cost)
    return inputs, chosen_setting(inputs)


def inputs_of(run: PlannedRun, cost: Cost) -> PredictionInputs:
    """Return the inputs of the prediction where exchanges have this cost."""
    node, sharded = run.machine.node, run.rule.traits.state is RankState.SHARDED
    sizes = [layer.gradient_bytes for layer in run.layers if layer.gradient_bytes]
    played = min(run.ranks, MAX_PLAYED_RANKS)
    copying = max(run.ranks_per_node, node.accelerators) if run.ranks > 1 else 0  # each all gradients, at once
    computing = replace(
        computing_of(run.layers, run.machine, run.traced, run.samples_of_rank, run.ranks_per_node),
        update=update_seconds(run) * (played / run.ranks if sharded else 1),
        pack=copying / node.to_host if node.to_host else 0.0,
        unpack=copying / node.to_device if node.to_device else 0.0,
        streams=node.to_host > 0,
    )
    buckets, asked = partial(buckets_of, sizes), {"clip": run.clip, "layer_norms": run.layer_norms}
    return prediction_inputs(run.rule, computing, cost, buckets, played, run.nodes, **asked)


def update_seconds(run: PlannedRun) -> float:
    """Return the seconds to update the weights of a byte of gradients, by memory alone, that of the accelerators where
    its bandwidth is known; 0 without any.

    An optimizer reads weights, gradients and what it keeps, and writes all but the gradients.
    """
    node, sharded = run.machine.node, run.rule.traits.state is RankState.SHARDED
    bandwidth, updating = node.device_bandwidth or node.memory_bandwidth, run.ranks_per_node
    if node.device_bandwidth and not sharded:  # each accelerator has all weights to update
        updating = max(updating, node.accelerators)
    return (3 + 2 * run.kept) * updating / bandwidth if bandwidth else 0.0


def _alone(run: PlannedRun) -> float:
    """Return the seconds of a step on one node, with its loading."""
    single = replace(run, nodes=1)
    return parts_with_loading(single, *predict_step(single, single.exchange.cost))[0].step


def even_cost(run: PlannedRun) -> Cost:
    """Return the cost that a run's exchanges have without its machine's slow links: times the estimate without over the
    estimate with them, since a slow link may be in measured rows as well."""
    known, bare = run.exchange.cost, replace(run.machine, collectives=())
    slow = replace(run, machine=bare).exchange.cost if run.machine.collectives else known
    even = replace(run, machine=replace(bare, slow_links={})).exchange.cost
    seconds = [known.seconds(nbytes) * even.seconds(nbytes) / slow.seconds(nbytes) for nbytes in MEASURED_BUCKET_BYTES]
    return fit(MEASURED_BUCKET_BYTES, seconds)


def _with_split_layers(
    run: PlannedRun, unsplit: RunPlan, step: PredictionInputs, played: Candidate, alone: float
) -> list[RunPlan]:
    """Return the row with split layers beside that without, which was played; none where nothing is split, nor unless
    splits that are chosen here make the step, with its loading, LEAST_GAIN times as fast."""
    if run.split is None or not run.rule.traits.groups or run.ranks == 1:
        return []
    facts, named = run.split(run.ranks)
    given = split_inputs(run, step, facts)
    choice = choose_splits(given, played) if named is None else None
    splits = named if choice is None else choice.splits
    if not splits:
        return []
    inputs = with_splits(given, splits)
    sent = sum(sent_of(given, layer, splits.get(layer.name)).nbytes for layer in given.layers)
    exchanged, memory = sent / gradient_bytes(1, run.ranks, 1), memory_with(splits, unsplit.memory, given)
    played = chosen_setting(inputs) if choice is None else choice.prediction
    row = row_of(run, inputs, played, memory, exchanged, alone)
    slower = choice is not None and unsplit.step < LEAST_GAIN * row.step
    return [] if slower else [replace(row, rule=row.rule + WITH_SPLITS, split=splits)]


def split_inputs(run: PlannedRun, step: PredictionInputs, facts: tuple[LayerFacts, ...]) -> SplitInputs:
    """Return the inputs of the choice of splits, which plays all ranks, for a step predicted in data parallelism."""
    placement = placement_of(run.nodes, run.ranks_per_node, run.machine.topology.supernode)
    sharded = run.rule.traits.state is RankState.SHARDED

    def of_sent(nodes: int) -> LinkCosts:
        """Return the costs on so many nodes, by the bytes that a rank sends."""
        sent, kinds = gradient_bytes(1.0, nodes * run.ranks_per_node, 1), ((run.wire, sharded, run.rule.algorithm), ())
        costs = (exchange_cost(run.machine, nodes, run.ranks_per_node, *kind).cost for kind in kinds)
        gradients, plain = (Cost(cost.latency, cost.per_byte / sent if sent else 0.0) for cost in costs)
        return LinkCosts(gradients, plain._replace(latency=plain.latency / 2))  # an all-gather has half the messages

    links = GroupLinks(placement, of_sent(run.nodes), of_sent(1))
    step = step._replace(costs=replace(step.costs, computing=replace(step.costs.computing, update=update_seconds(run))))
    return SplitInputs(facts, step, run.samples_of_rank / run.traced, links)


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
    step, without_loading = parts.step, replace(parts, loading=0.0).step
    error = INTERVAL_ERROR * without_loading if inputs.costs.collective != FREE else 0.0
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
        low=max(least, without_loading - error),
        high=max(least, without_loading + error),
        speedup=alone / step,
        memory=memory,
        bottleneck="",
        epoch=None if run.epoch_samples is None else epoch_seconds(run.epoch_samples, run.minibatch, step),
        wire=run.wire or "float32",
        reading=loading.reading,
        decoding=loading.decoding,
        basis=run.exchange.basis,
    )
    return replace(row, bottleneck=bottleneck(row, exchanged * inputs.costs.collective.per_byte, run.machine.node))


def parts_with_loading(run: PlannedRun, inputs: PredictionInputs, played: Candidate) -> tuple[StepParts, float]:
    """Return the parts of a step that was played, with its loading, and the seconds that it takes at least."""
    silent = predicted(inputs._replace(costs=inputs.costs.without_exchanges()), played.setting).prediction.step
    parts = parts_of(inputs.costs.computing.whole, silent, played.prediction.step)
    least = least_step(parts.computing, parts.update, run.loading)
    return replace(parts, loading=max(0.0, least - parts.step)), least


def bottleneck(row: RunPlan, links: float, node: NodeFacts) -> str:
    """Return the sentence for a row; `links` are the seconds of its collectives that are bytes on links."""
    if too_small := lacking_memory(row, node):
        return too_small
    step = row.step
    largest = max(row.computing, row.communication, row.update)
    starved = isclose(step, max(row.reading, row.decoding))
    if row.loading and (starved or row.loading >= largest):
        return _late(row, starved)
    if largest == row.computing:
        hidden = row.communicating - row.communication
        behind = f"; {_ms(hidden)} of communication are hidden behind computing" if hidden >= LEAST_SHOWN else ""
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


def lacking_memory(row: RunPlan, node: NodeFacts) -> str:
    """Return the sentence for memory that is too small, of an accelerator or of a rank on the host; "" where all fits,
    or is not known.

    An accelerator has weights, gradients, optimizer and its samples' outputs; the host all else, and gradients again.
    """
    ranks, memory, rank, why = row.ranks / row.nodes, row.memory, "a rank", ""
    if node.accelerators:
        sharing = ranks / node.accelerators
        copies = max(1.0, sharing) * (memory.weights + memory.gradients + memory.optimizer)
        if 0 < node.device_memory_bytes < (used := copies + sharing * memory.activations):
            return f"memory: an accelerator needs {used / 1e9:.3g} GB of {node.device_memory_bytes / 1e9:.3g} GB"
        memory = memory._replace(weights=0.0, optimizer=0.0, activations=0.0)
    capacity = node.memory_bytes / ranks
    if gathered := memory.gathered:  # on rank 0, which has what the others of its node leave
        capacity += (ranks - 1) * max(0.0, capacity - memory._replace(gathered=0.0).total)
        rank, why = "rank 0", f"; {gathered / 1e9:.3g} GB are states of all ranks, gathered for a checkpoint"
    if not 0 < capacity < memory.total:
        return ""
    return f"memory: {rank} needs {memory.total / 1e9:.3g} GB of {capacity / 1e9:.3g} GB{why}"


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
