"""Times of a run, by kind and step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

SEQUENTIAL_KINDS = ("loading", "computing", "waiting")
"""Kinds of time that follow each other and add up to a rank's time."""

CONCURRENT_KINDS = ("communicating", "updating")
"""Kinds of time that overlap with those, or that the rank waits for."""

KINDS = (*SEQUENTIAL_KINDS, *CONCURRENT_KINDS)

MAX_STEPS_RECORDED = 1 << 18
"""Largest number of steps kept until `take_steps`; beyond it at least the newest half stays."""


class Recorder:
    """Seconds of this rank, by kind.

    loading         making the next batch
    computing       forward, backward, and counting correct predictions
    waiting         for an exchange, an update or another rank, without computing
    communicating   exchanges, also while the rank computes
    updating        the optimizer
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys(KINDS, 0.0)
        self._all = dict.fromkeys(KINDS, 0.0)
        self._steps = array("f")

    @contextmanager
    def record(self, kind: str) -> Iterator[None]:
        """Add the time of the block to a kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds to a kind."""
        self._now[kind] += seconds
        self._all[kind] += seconds

    def end_step(self) -> None:
        """End a step: it gets all time recorded since the last step."""
        if len(self._steps) >= MAX_STEPS_RECORDED * len(KINDS):
            del self._steps[: MAX_STEPS_RECORDED // 2 * len(KINDS)]
        self._steps.extend(self._now[kind] for kind in KINDS)
        self._now = dict.fromkeys(KINDS, 0.0)

    def discard(self) -> None:
        """Assign the time recorded since the last step to no step."""
        self._now = dict.fromkeys(KINDS, 0.0)

    def take_steps(self) -> npt.NDArray[np.float32]:
        """Return the seconds of the steps since the last call, float32, of shape (steps, kinds)."""
        taken, self._steps = self._steps, array("f")
        return np.array(taken, np.float32).reshape(-1, len(KINDS))

    def split(self) -> dict[str, float]:
        """Return the seconds of each kind since the start."""
        return dict(self._all)
