"""Wall time of a job that trains, part by part: the time that a scheduler is asked for.

    │ start │ pack │ tuning │ epoch 0: steps │ test │ checkpoint │ epoch 1: steps │ test │ checkpoint │ ...

`docs/planning.md` has the parts and their sources. A scheduler ends a job that takes longer than it asked for, and a
job that asks for far more waits longer in the queue. The first steps are tuned: 5 whose communication does not hide,
and 6 trials of 5 steps, each 15% slower than the best.

Worked example: 100 epochs of 60 steps. A step takes 50 ms: 25 ms of computing, 5 ms of updates, 30 ms of collectives.
Steps take 6,000 * 1.13 * 50 ms = 339 s, tuning adds 5 * (60 - 50) ms + 30 * 0.15 * 50 ms = 0.28 s. A test has 160
samples on each rank, whose forward passes take 50 ms: 5 s for all. A checkpoint of 200 MB at 100 MB/s takes 2 s, 100 of
them 200 s. With the start that is 20 + 0.28 + 339 + 5 + 200 = 564.28 s, for which 10 minutes are asked.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from unisono.plan.choose import is_searched
from unisono.plan.layer_costs import product_seconds
from unisono.plan.loading import held_bytes
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_row import RunPlan
from unisono.plan.trials import TRIAL_RATIO

START_SECONDS = 20.0
"""Seconds of a run besides those that follow from it: 6.0 and 6.5 s were measured with one and two ranks on 2 busy
cores (`unisono train digits`, one epoch); three times that is assumed, for imports by many nodes from one disk."""

STEP_MARGIN = 1.13
"""Seconds of a step over those predicted: none of 40 sealed runs took more than 12.2% longer (`benchmarks/foresight`).
A plan's interval has 9 of 10 runs; with its end for each step, 3 of 20 jobs ended 1 to 4% too late."""

DISK_BANDWIDTH = 1e8
"""Bytes per second of checkpoints and packs where the machine file has no disk.bandwidth: a slow disk, assumed."""

MEASURED_STEPS, TRIAL_STEPS = 5, 30
"""Steps that are measured before there are times to choose by, and steps of trials (`reducer/tuning.py`)."""

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
    checkpoint = sum(layer.parameter_bytes for layer in run.layers) * (1 + run.kept) / disk
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
    return MEASURED_STEPS * max(0.0, unhidden - plan.step) + TRIAL_STEPS * (TRIAL_RATIO - 1) * plan.step
