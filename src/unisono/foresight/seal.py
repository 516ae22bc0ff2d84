"""Sealed predictions of runs: written before the first step into the run's folder, and never rewritten.

    RUN/prediction.json       of the run's first start      mode 0444; its digest goes into the ledger, so that a
    RUN/prediction-2.json     of its first resumption       seal that was changed afterwards is found out

Worked example, 4 ranks: computing 40 ms, communication that does not hide 10 ms, updates that do not hide 2 ms: a step
of 52 ms, in 1,000 steps 52 s. Without a machine file the inputs of a prediction are measured in the first steps; such a
seal is written once these are over, and names their number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.files import write_atomically
from unisono.plan.choose import StepParts
from unisono.processor import ALONE, ProcessorUse
from unisono.tables import as_json, from_json

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
    period: int = 1
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
    def all_steps(self) -> float:
        """Seconds of all steps of the run; its start, tests and checkpoints are not in it."""
        return self.run.steps * self.step

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
    content = as_json(prediction, step=prediction.step, all_steps=prediction.all_steps)
    try:
        with write_atomically(path) as aside:
            aside.write_bytes(content)
            aside.chmod(0o444)
    except OSError as error:
        raise UsageError(f"cannot seal the prediction in {path}: {error.strerror}; free space there") from error
    return Seal(path, hashlib.sha256(content).hexdigest(), prediction)


def read_seal(path: Path) -> Seal:
    """Return the seal in a file. Raises UsageError where there is none, or it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    prediction = from_json(SealedPrediction, content, f"{path} is no sealed prediction")
    return Seal(path, hashlib.sha256(content).hexdigest(), prediction)


def seals_of(folder: Path) -> list[Path]:
    """Return the paths of the seals in a run's folder, the oldest first."""
    found: list[Path] = []
    while (path := _path(folder, len(found) + 1)).exists():
        found.append(path)
    return found


def _path(folder: Path, number: int) -> Path:
    return folder / (f"{SEAL}.json" if number == 1 else f"{SEAL}-{number}.json")
