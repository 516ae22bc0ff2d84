"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KINDS = ("loading", "computing", "communicating", "waiting")


@dataclass
class Recorder:
    """Seconds of this rank by what they went to.

    loading         making the next batch
    computing       forward, backward, update, and counting what is right
    communicating   the exchange, from when all ranks have come
    waiting         until the last rank has come to the exchange
    """

    loading: float = 0.0
    computing: float = 0.0
    communicating: float = 0.0
    waiting: float = 0.0

    @contextmanager
    def record(self, kind: str) -> Iterator[None]:
        """Add the time of the block to one kind."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, kind, getattr(self, kind) + time.perf_counter() - start)

    def split(self) -> dict[str, float]:
        """The seconds of each kind."""
        return {kind: getattr(self, kind) for kind in KINDS}
