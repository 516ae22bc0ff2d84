"""Wall time of a job: the worked example in exact numbers, and constants that are those of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_run_report import FOUR

from unisono.compute.convolution_plan import AUTOTUNE_REPETITIONS
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import DiskFacts, MachineFacts, NodeFacts
from unisono.plan.planned_run import PlannedRun
from unisono.plan.trace import TracedLayer
from unisono.plan.wall_time import (
    AUTOTUNE_CALLS,
    DISK_BANDWIDTH,
    MEASURED_STEPS,
    TRIAL_STEPS,
    job_seconds,
    slurm_time,
)
from unisono.reducer import tuning
from unisono.rules import BSP, LocalSGD
from unisono.step.overlaps import OVERLAPS

MACHINE = MachineFacts("example", NodeFacts(flops=1e12))
LAYERS = [TracedLayer("0", "Linear", forward_flops=625_000_000, backward_flops=1, parameter_bytes=100_000_000)]
"""A forward pass of 2 samples takes 0.625 ms, of 16 samples 5 ms."""

RUN = PlannedRun(MACHINE, LAYERS, 2, BSP(), 64, 4, epoch_samples=3840, test_samples=640, epochs=100)
NOT_SEARCHED = replace(RUN, rule=LocalSGD(every=4))


def test_the_worked_example() -> None:
    found = job_seconds(RUN, FOUR)
    assert found == pytest.approx((20, 0, 0.275, 339, 5, 200))
    assert found.total == pytest.approx(564.275)
    assert slurm_time(found.total) == "0-00:10:00"


def test_nothing_is_tuned_on_one_rank_or_where_nothing_is_searched() -> None:
    assert job_seconds(RUN, replace(FOUR, ranks=1)).tuning == job_seconds(NOT_SEARCHED, FOUR).tuning == 0
    assert job_seconds(replace(NOT_SEARCHED, autotunes=True), FOUR).tuning == AUTOTUNE_CALLS * FOUR.computing


def test_samples_are_read_once_and_decoded_in_tests() -> None:
    machine = replace(MACHINE, disk=DiskFacts(1e6))
    run = replace(RUN, machine=machine, samples=SampleFacts(nbytes=1000), ranks_per_node=2)
    found = job_seconds(run, replace(FOUR, ranks=8, samples=8, decoding=0.08))
    assert found.pack == pytest.approx(3840 * 1000 / 4 / 1e6)
    assert found.checkpoints == pytest.approx(100 * 200e6 / 1e6)
    assert found.tests == pytest.approx(100 * 80 * (2 * 0.3125e-3 + 0.01))


def test_checkpoints_within_an_epoch_count() -> None:
    each = 200e6 / DISK_BANDWIDTH
    for every, number in ((0, 1), (59, 2), (60, 1), (20, 3), (1, 60)):
        run = replace(RUN, epochs=1, checkpoint_every=every)
        assert job_seconds(run, FOUR).checkpoints == pytest.approx(number * each)


def test_the_constants_are_those_of_a_run() -> None:
    # two more in other buckets: a quarter as large, and equal ones
    assert (2 + len(OVERLAPS)) * (1 + tuning.STEPS_PER_TRIAL) == TRIAL_STEPS
    assert MEASURED_STEPS == 5  # step 0 and steps 1 to 4
    assert AUTOTUNE_CALLS % (1 + AUTOTUNE_REPETITIONS) == 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1, "0-00:01:00"), (60, "0-00:01:00"), (61, "0-00:02:00"), (3600, "0-01:00:00"), (108_000, "1-06:00:00")],
)
def test_slurm_reads_days_hours_minutes(seconds: float, expected: str) -> None:
    assert slurm_time(seconds) == expected
