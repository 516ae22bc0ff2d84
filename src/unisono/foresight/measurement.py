"""Measured step of a run, by part, over the steps after its first ones.

    steps      1 2 3 │ 4 5 6 │ 7 8 9 │ 10 11 12 │ 13         3 a period (local_sgd:3), 3 skipped, 1 left over
                skip │  mean │  mean │   mean   │            median, 5th and 95th percentile of the means

A rank's step is loading + computing + waiting. The parts are those of the slowest rank, the one that computes longest:
it waits for exchanges and updates alone, the others wait for it too.

Worked example, 4 ranks: they compute 40, 40, 40 and 44 ms and wait 14, 14, 14 and 10 ms. A step takes 54 ms; its parts
are those of rank 3: 44 ms of computing, 10 ms of exchanges and updates that do not hide.

**Disturbed** is a machine whose steps differ: the 95th percentile is above 1.5 medians, or the median of the last third
of the steps is more than 1.1 times that of the first third, or the other way round. A program whose steps are all alike
gives neither, unless something else takes its cores or its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unisono.errors import UsageError
from unisono.processor import ALONE, ProcessorUse
from unisono.tables import from_json

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
    period: int = 1
    """Steps over which a time is averaged: those of the rule's period."""
    all_steps: float = 0.0
    """Seconds of all steps since the run began or resumed, without tests and checkpoints."""
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
    of = {kind: means[..., number] for number, kind in enumerate(kinds)}
    computing = np.median(of["computing"], axis=1)
    slowest = int(computing.argmax())
    of = {kind: times[slowest] for kind, times in of.items()}
    step = of["loading"] + of["computing"] + of["waiting"]
    sequential = [kinds.index(kind) for kind in ("loading", "computing", "waiting")]
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
        all_steps=float(seconds[slowest][:, sequential].sum(dtype=np.float64)),
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
    found = spread(step)
    if len(step) < LEAST_PERIODS or not found.median:
        return ""
    if found.high > DISTURBED_SPREAD * found.median:
        return f"the 95th percentile of the step is {found.high / found.median:.2f} medians"
    third = len(step) // 3
    drift = float(np.median(step[-third:]) / np.median(step[:third]))
    if max(drift, 1 / drift) > DISTURBED_DRIFT:
        return f"the last third of the steps took {drift:.2f} times as long as the first"
    return ""


def read_measurement(path: Path) -> Measurement:
    """Return the measurement in a file. Raises UsageError where there is none, or it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return from_json(Measurement, content, f"{path} is no measurement")
