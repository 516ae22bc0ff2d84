"""Sealed predictions of runs: written before the first step into the run's folder, and never rewritten.

    RUN/prediction.json       of the run's first start      mode 0444; its digest goes into the ledger, so that a
    RUN/prediction-2.json     of its first resumption       seal that was changed afterwards is found out

Worked example, 4 ranks: computing 40 ms, communication that does not hide 10 ms, updates that do not hide 2 ms: a step
of 52 ms, in 1,000 steps 52 s.

Measured is the step over all steps after the first ones (`docs/planning_accuracy.md`):

    steps      1 2 3 │ 4 5 6 │ 7 8 9 │ 10 11 12 │ 13         3 a period (local_sgd:3), 3 skipped, 1 left over
                skip │  mean │  mean │   mean   │            median, 5th and 95th percentile of the means

A rank's step is loading + computing + waiting. The parts are those of the slowest rank, the one that computes longest:
it waits for exchanges and updates alone, the others wait for it too. If three ranks compute 40 ms and wait 14 ms, and
one computes 44 ms, a step takes 54 ms: 44 ms of computing, 10 ms of exchanges and updates that do not hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.files import naming_os_errors, write_atomically
from unisono.plan.choose import StepParts
from unisono.processor import ALONE, ProcessorUse
from unisono.tables import as_json, from_json, number

SEAL, MEASUREMENT = "prediction", "measurement"
"""Beginnings of the names of files in a run's folder."""

BEFORE = "before the first step"
"""Time of a seal that was made from a machine file."""


@dataclass(frozen=True)
class ProgramFacts:
    """Program of the predicted step."""

    overlap: str = ""
    bucket_bytes: int = 0
    """Largest size of a bucket."""
    buckets: int = 0
    nbytes: int = 0
    """Bytes of gradients in all buckets."""
    schedule: str = ""
    """Schedule of large buckets; empty where nothing goes over a link, and where the run chooses it."""
    wire: str = ""
    """Number format between nodes; empty for the gradients' own."""
    period: int = number(1, at_least=1)
    """Steps after which the program repeats."""
    digest: str = ""
    """SHA-256 of the tasks of rank 0 over a period."""


@dataclass(frozen=True)
class CostFacts:
    """Costs that the prediction was made from, in seconds."""

    latency: float = 0.0
    """Latency of an allreduce."""
    per_byte: float = 0.0
    """Seconds of an allreduce for a byte of gradients."""
    update: float = 0.0
    """Seconds to update the weights of a byte of gradients."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a predicted run."""

    recipe: str
    model: str
    rule: str
    ranks: int
    nodes: int
    batch: int
    """Samples of a step, over all ranks."""
    steps: int = 0
    """Steps that the run is to make."""
    machine: str = ""
    """Name in the machine file; empty where the first steps were measured instead."""
    machine_digest: str = ""
    """SHA-256 of the machine file."""
    settings: str = ""
    """Hash of the other keys of the recipe that change a step's time; empty where an older release has not told."""


@dataclass(frozen=True)
class SealedPrediction:
    """Prediction of a run's step. Times are seconds."""

    sealed: str
    """Time of the seal: "before the first step", or "after 24 tuning steps"."""
    version: str
    """Version of Unisono."""
    run: RunFacts
    parts: StepParts
    low: float
    """Lower end of the interval of the step; equal to `high` where the prediction has no interval."""
    high: float
    share: float
    """Nominal share, 0 to 1, of steps within such intervals."""
    program: ProgramFacts = ProgramFacts()
    costs: CostFacts = CostFacts()
    communicating: float = 0.0
    """Seconds of a step in which a collective runs, hidden or not."""
    updating: float = 0.0
    """Seconds of a step in which weights are updated, hidden or not."""
    time: str = ""
    """Local time of the seal, ISO 8601."""
    doubt: str = ""
    """Reason for which the trials of the first steps decided nothing; empty where they did, and without trials."""
    processor: ProcessorUse = ALONE
    """Use of the ranks' cores by others during the first steps; 0 for a machine file."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.parts.step

    @property
    def has_interval(self) -> bool:
        """True where the prediction has an interval."""
        return self.high > self.low

    @property
    def from_machine(self) -> bool:
        """True where the prediction was made from a machine file."""
        return bool(self.run.machine)


class Seal(NamedTuple):
    """Sealed prediction in its file."""

    path: Path
    digest: str
    """SHA-256 of the file."""
    prediction: SealedPrediction

    @property
    def measurement(self) -> Path:
        """Path of the measurement of the steps that it predicts."""
        return self.path.with_name(self.path.name.replace(SEAL, MEASUREMENT, 1))


def write_seal(folder: Path, prediction: SealedPrediction) -> Seal:
    """Write a prediction into a run's folder, beside those that are there. Return it.

    Raises UsageError where it cannot be written. The caller holds the lock of the folder.
    """
    path = _path(folder, len(seals_of(folder)) + 1)
    content = as_json(prediction, step=prediction.step, all_steps=prediction.run.steps * prediction.step)
    sealing = naming_os_errors(f"cannot seal the prediction in {path}", remedy="; free space there")
    with sealing, write_atomically(path) as aside:
        aside.write_bytes(content)
        aside.chmod(0o444)
    return Seal(path, hashlib.sha256(content).hexdigest(), prediction)


def read_seal(path: Path) -> Seal:
    """Return the seal in a file. Raises UsageError where there is none, or it cannot be read."""
    content = _content(path)
    prediction = from_json(SealedPrediction, content, f"{path} is no sealed prediction")
    return Seal(path, hashlib.sha256(content).hexdigest(), prediction)


def _content(path: Path) -> bytes:
    with naming_os_errors(f"cannot read {path}"):
        return path.read_bytes()


def seals_of(folder: Path) -> list[Path]:
    """Return the paths of the seals in a run's folder, the oldest first."""
    paths: list[Path] = []
    while (path := _path(folder, len(paths) + 1)).exists():
        paths.append(path)
    return paths


def _path(folder: Path, ordinal: int) -> Path:
    return folder / (f"{SEAL}.json" if ordinal == 1 else f"{SEAL}-{ordinal}.json")


WARMUP_STEPS = 5
"""Steps that are not measured after a start and after a search: they plan exchanges and fill caches."""

DISTURBED_SPREAD, DISTURBED_DRIFT = 1.5, 1.1
"""Ratios to the median from which steps count as disturbed: of the 95th percentile, and of a third of the steps."""

LEAST_PERIODS = 6
"""Smallest number of periods in which a disturbance is looked for: two in each third."""

Seconds = npt.NDArray[np.float32]
"""Seconds of each kind, of shape (ranks, steps, kinds)."""


@dataclass(frozen=True)
class Spread:
    """Median of a time, and its 5th and 95th percentile, in seconds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """Measured step of a run, of its slowest rank."""

    steps: int
    """Steps that were measured."""
    step: Spread
    computing: Spread
    waiting: Spread
    """Time without computing: exchanges and updates that do not hide, and other ranks."""
    loading: Spread = Spread(0.0, 0.0, 0.0)
    communicating: Spread = Spread(0.0, 0.0, 0.0)
    """Exchanges, hidden or not."""
    updating: Spread = Spread(0.0, 0.0, 0.0)
    """Updates, hidden or not."""
    mean_computing: float = 0.0
    """Mean over the ranks of their median seconds of computing."""
    slowest: int = 0
    """Rank that computes longest."""
    skipped: int = 0
    """First steps, which were not measured."""
    period: int = number(1, at_least=1)
    """Steps over which a time is averaged: those of the rule's period."""
    all_steps: float = 0.0
    """Seconds of all steps since the run began or resumed, without tests and checkpoints."""
    timed: int = 0
    """Number of these steps; 0 where an older release has not told."""
    wall: float = 0.0
    """Seconds since the run began, with tests and checkpoints; time while it was stopped does not count."""
    disturbed: str = ""
    """Sign of a disturbed machine; empty without any."""
    seal: str = ""
    """SHA-256 of the seal that predicts these steps; empty without one."""
    processor: ProcessorUse = ALONE
    """Use of the ranks' cores by others since the seal."""


def measure(seconds: Seconds, kinds: Sequence[str], skip: int, period: int = 1) -> Measurement | None:
    """Return the measurement of steps after the first `skip`; None where no whole period is left."""
    ranks, steps, _ = seconds.shape
    periods = (steps - skip) // period
    if periods < 1:
        return None
    kept = seconds[:, skip : skip + periods * period].astype(np.float64)
    means = kept.reshape(ranks, periods, period, len(kinds)).mean(axis=2)
    computing = np.median(means[..., kinds.index("computing")], axis=1)
    slowest = int(computing.argmax())
    of = {kind: means[slowest, :, column] for column, kind in enumerate(kinds)}
    step = of["loading"] + of["computing"] + of["waiting"]
    return Measurement(
        steps=periods * period,
        step=spread(step),
        computing=spread(of["computing"]),
        waiting=spread(of["waiting"]),
        loading=spread(of["loading"]),
        communicating=spread(of["communicating"]),
        updating=spread(of["updating"]),
        mean_computing=float(computing.mean()),
        slowest=slowest,
        skipped=skip,
        period=period,
        disturbed=disturbance(step),
    )


def spread(times: Sequence[float] | npt.NDArray[np.float64]) -> Spread:
    """Return the median, the 5th and the 95th percentile of times.

    >>> spread([1.0, 2.0, 3.0])
    Spread(median=2.0, low=1.1, high=2.9)
    """
    low, median, high = np.percentile(times, [5, 50, 95]).tolist()
    return Spread(median, low, high)


def disturbance(step: Sequence[float] | npt.NDArray[np.float64]) -> str:
    """Return the sign of a disturbed machine in the seconds of consecutive periods; empty without any.

    >>> disturbance([1.0] * 9 + [2.0] * 3)
    'the 95th percentile of the step is 2.00 medians'
    """
    percentiles = spread(step)
    if len(step) < LEAST_PERIODS or not percentiles.median:
        return ""
    if percentiles.high > DISTURBED_SPREAD * percentiles.median:
        return f"the 95th percentile of the step is {percentiles.high / percentiles.median:.2f} medians"
    third = len(step) // 3
    drift = float(np.median(step[-third:]) / np.median(step[:third]))
    if max(drift, 1 / drift) > DISTURBED_DRIFT:
        return f"the last third of the steps took {drift:.2f} times as long as the first"
    return ""


def read_measurement(path: Path) -> Measurement:
    """Return the measurement in a file. Raises UsageError where there is none, or it cannot be read."""
    return from_json(Measurement, _content(path), f"{path} is no measurement")
