"""Row of a plan: a predicted step with its loading, its interval, its speedup and its bottleneck.

    predicted step ─┐
    loading ────────┼─▶ step ─▶ speedup over one node, epoch
    error ──────────┘     └──▶ from, to

**Interval.** Of 25 runs on 2 to 8 emulated hosts that were probed, whose computing was exact, 9 in 10 took at most 4.8%
more or less than predicted (`benchmarks/foresight/calibration`). So that error is one of communication, and a step with
communication is given plus and minus 4.8%, but never below its computing and updates, nor below its loading. The
interval does not cover what stands here in place of measurements: computing, memory, disk and decoding at the rates of
the machine file, and collectives at their estimate.

Worked example: 25 ms of computing and 25 ms of communication on 4 nodes: 50 ms, from 47.6 ms to 52.4 ms. With one
node at 100 ms the speedup is 2, the efficiency 50%. If a batch takes 52 ms to decode, the step takes 52 ms, from 52 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.plan.bottleneck import StepShares, bottleneck
from unisono.plan.exchange_cost import FREE
from unisono.plan.loading import least_step
from unisono.plan.machines import MachineFacts
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_settings import RunSettings, samples_of_rank
from unisono.plan.scaling import epoch_seconds

INTERVAL_ERROR = 0.048
"""Error relative to the predicted step that 9 of 10 runs of `benchmarks/foresight/calibration` do not exceed."""

INTERVAL_SHARE = 0.9
"""Nominal share of runs, 0 to 1, whose step lies in the interval."""


@dataclass(frozen=True)
class RunPlan:
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
    computing: float
    communication: float
    update: float
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
    loading: float = 0.0
    """Seconds that the step takes longer because of loading."""
    reading: float = 0.0
    """Seconds in which a node reads the step's samples, beside training."""
    decoding: float = 0.0
    """Seconds in which a node decodes them, beside training."""
    split: Mapping[str, str] = field(default_factory=dict)
    """Split of each layer, by its name, in words of a parallel plan; empty: data parallelism."""
    basis: str = ""
    """Basis of the cost of exchanges (`exchange_cost.BASES`, or "simulated"); empty where nothing goes over a link."""
    estimated: str = ""
    """Schedules of buckets whose simulation was refused, so that their seconds are estimates."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.computing + self.communication + self.update + self.loading

    @property
    def efficiency(self) -> float:
        """Speedup over the number of nodes."""
        return self.speedup / self.nodes


class PlannedStep(NamedTuple):
    """Predicted step of a rule on a number of nodes, with the setting that it is predicted for."""

    rule: str
    shares: StepShares
    memory: RankMemory
    exchanged: float
    """Bytes of gradients or weights that a step exchanges, by which its shares' cost counts."""
    overlap: str
    bucket_bytes: int
    schedule: str
    wire: str | None
    split: Mapping[str, str] = {}
    basis: str = ""
    estimated: str = ""
    slower: str = ""
    """Sentence about the slow link or node that costs most (`unequal.py`); empty: none does."""


def row_of(machine: MachineFacts, settings: RunSettings, nodes: int, found: PlannedStep, alone: float) -> RunPlan:
    """Return the row of a predicted step; `alone` are the seconds of that step on one node, with its loading."""
    shares, step = found.shares, found.shares.step
    least = least_step(shares.computing, shares.update, shares.samples)
    error = INTERVAL_ERROR * shares.alone if shares.cost != FREE else 0.0
    capacity = machine.node.memory_bytes / settings.ranks_per_node
    samples = settings.epoch_samples
    longest = bottleneck(shares, found.exchanged, found.memory.total, capacity)
    return RunPlan(
        rule=found.rule,
        nodes=nodes,
        ranks=nodes * settings.ranks_per_node,
        samples=samples_of_rank(settings, nodes),
        overlap=found.overlap,
        bucket_bytes=found.bucket_bytes,
        schedule=found.schedule,
        computing=shares.computing,
        communication=shares.communication,
        update=shares.update,
        communicating=shares.communicating,
        low=max(least, shares.alone - error),
        high=max(least, shares.alone + error),
        speedup=alone / step,
        memory=found.memory,
        bottleneck=f"{found.slower}; {longest}" if found.slower else longest,
        epoch=None if samples is None else epoch_seconds(samples, settings.minibatch, step),
        wire=found.wire or "float32",
        loading=shares.loading,
        reading=shares.samples.reading,
        decoding=shares.samples.decoding,
        split=found.split,
        basis=found.basis,
        estimated=found.estimated,
    )
