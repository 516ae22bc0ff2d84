"""Where the time of a run goes, step by step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

AHEAD = ("loading", "computing", "waiting")
"""What follows each other, and makes up a rank's time."""

BESIDE = ("communicating", "updating")
"""What goes on beside that, or is waited for."""

KINDS = (*AHEAD, *BESIDE)

MOST_STEPS = 1 << 18
"""Steps that are kept until they are taken; of more the newest half at least."""


class Recorder:
    """Seconds of this rank by what they went to.

    loading         making the next batch
    computing       forward, backward, and counting what is right
    waiting         for an exchange, an update or another rank, with nothing to compute
    communicating   exchanges, whatever goes on beside them
    updating        the optimizer
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys(KINDS, 0.0)
        self._all = dict.fromkeys(KINDS, 0.0)
        self._steps = array("f")

    @contextmanager
    def record(self, kind: str) -> Iterator[None]:
        """Add the time of the block to one kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - start)

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds to one kind."""
        self._now[kind] += seconds
        self._all[kind] += seconds

    def end_step(self) -> None:
        """What was recorded since the last step was one step's."""
        if len(self._steps) >= MOST_STEPS * len(KINDS):
            del self._steps[: MOST_STEPS // 2 * len(KINDS)]
        self._steps.extend(self._now[kind] for kind in KINDS)
        self._now = dict.fromkeys(KINDS, 0.0)

    def leave_out(self) -> None:
        """What was recorded since the last step belongs to no step."""
        self._now = dict.fromkeys(KINDS, 0.0)

    def take_steps(self) -> npt.NDArray[np.float32]:
        """The steps since the last call, of shape (steps, kinds)."""
        taken, self._steps = self._steps, array("f")
        return np.array(taken, np.float32).reshape(-1, len(KINDS))

    def split(self) -> dict[str, float]:
        """The seconds of each kind since the start."""
        return dict(self._all)
