"""Wall time of a job: the worked example in exact numbers, and constants that are those of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_run_report import FOUR

from unisono.compute.convolution_plan import AUTOTUNE_REPETITIONS
from unisono.errors import UsageError
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import DiskFacts, MachineFacts, NodeFacts
from unisono.plan.run_settings import RunSettings
from unisono.plan.trace import TracedLayer
from unisono.plan.wall_time import (
    AUTOTUNE_CALLS,
    DISK_BANDWIDTH,
    MEASURED_STEPS,
    START_SECONDS,
    TRIAL_RATIO,
    TRIAL_STEPS,
    Job,
    job_seconds,
    slurm_time,
)
from unisono.reducer import tuning
from unisono.rules import BSP
from unisono.step.overlaps import OVERLAPS

MACHINE = MachineFacts("example", NodeFacts(flops=1e12))
SETTINGS = RunSettings(64, (4,), {"bsp": BSP()}, traced=2, epoch_samples=3840)
LAYERS = [TracedLayer("0", "Linear", forward_flops=625_000_000, backward_flops=1, parameter_bytes=100_000_000)]
"""A forward pass of 2 samples takes 0.625 ms, of 16 samples 5 ms."""

JOB = Job(100, test_samples=640, start=20.0)


def test_the_worked_example() -> None:
    found = job_seconds(FOUR, MACHINE, SETTINGS, LAYERS, True, JOB)
    assert found == pytest.approx((20, 0, 0.275, 339, 5, 200))
    assert found.total == pytest.approx(564.275)
    assert slurm_time(found.total) == "0-00:10:00"


def test_nothing_is_tuned_on_one_rank_or_where_nothing_is_searched() -> None:
    alone = job_seconds(replace(FOUR, ranks=1), MACHINE, SETTINGS, LAYERS, True, JOB)
    given = job_seconds(FOUR, MACHINE, SETTINGS, LAYERS, False, JOB)
    assert alone.tuning == given.tuning == 0
    timed = job_seconds(FOUR, MACHINE, SETTINGS, LAYERS, False, JOB._replace(autotunes=True))
    assert timed.tuning == AUTOTUNE_CALLS * FOUR.computing


def test_samples_are_read_once_and_decoded_in_tests() -> None:
    machine = replace(MACHINE, disk=DiskFacts(1e6))
    settings = replace(SETTINGS, samples=SampleFacts(nbytes=1000), ranks_per_node=2)
    found = job_seconds(replace(FOUR, ranks=8, samples=8, decoding=0.08), machine, settings, LAYERS, False, JOB)
    assert found.pack == pytest.approx(3840 * 1000 / 4 / 1e6)
    assert found.checkpoints == pytest.approx(100 * 200e6 / 1e6)
    assert found.tests == pytest.approx(100 * 80 * (2 * 0.3125e-3 + 0.01))


def test_tests_take_as_long_as_on_the_slowest_node() -> None:
    slow = replace(SETTINGS, slow_nodes={3: 4.0, 4: 9.0})
    found = job_seconds(FOUR, MACHINE, slow, LAYERS, True, JOB)
    assert found.tests == pytest.approx(4 * job_seconds(FOUR, MACHINE, SETTINGS, LAYERS, True, JOB).tests)


def test_checkpoints_within_an_epoch_count() -> None:
    each = 200e6 / DISK_BANDWIDTH
    for every, number in ((0, 1), (59, 2), (60, 1), (20, 3), (1, 60)):
        job = JOB._replace(epochs=1, checkpoint_every=every)
        assert job_seconds(FOUR, MACHINE, SETTINGS, LAYERS, False, job).checkpoints == pytest.approx(number * each)


def test_the_constants_are_those_of_a_run() -> None:
    assert tuning.TRIAL_RATIO == TRIAL_RATIO
    # two more in other buckets: a quarter as large, and equal ones
    assert (2 + len(OVERLAPS)) * (1 + tuning.STEPS_PER_TRIAL) == TRIAL_STEPS
    assert MEASURED_STEPS == 5  # step 0 and steps 1 to 4
    assert AUTOTUNE_CALLS % (1 + AUTOTUNE_REPETITIONS) == 0
    assert Job().start == START_SECONDS


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1, "0-00:01:00"), (60, "0-00:01:00"), (61, "0-00:02:00"), (3600, "0-01:00:00"), (108_000, "1-06:00:00")],
)
def test_slurm_reads_days_hours_minutes(seconds: float, expected: str) -> None:
    assert slurm_time(seconds) == expected


def test_the_samples_of_an_epoch_are_needed() -> None:
    with pytest.raises(UsageError, match="--time needs the samples of an epoch: give --epoch-samples"):
        job_seconds(FOUR, MACHINE, replace(SETTINGS, epoch_samples=None), LAYERS, True, JOB)
