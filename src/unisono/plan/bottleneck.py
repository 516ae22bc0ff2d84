"""Bottleneck of a planned step, as a sentence: memory that is too small, else the longest of the step's parts.

step   │ computing 12 ms │ communication 30 ms │ update 1 ms │       communication: of its collectives' 36 ms, 30 ms
                                                                     are bytes on links and 6 ms are latency
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.step.costs import Cost


class StepShares(NamedTuple):
    """Parts of a step, in seconds."""

    computing: float
    communication: float
    """Communication that does not hide."""
    update: float
    """Updates that do not hide."""
    communicating: float
    """Seconds in which a collective runs, hidden or not."""
    cost: Cost
    """Cost of an allreduce."""

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.computing + self.communication + self.update


def bottleneck(shares: StepShares, exchanged: float, memory: float, capacity: float) -> str:
    """Return the sentence; `exchanged` are bytes of gradients or weights in a step, `capacity` the bytes of memory that
    a rank has (0: not known), `memory` those that it needs."""
    if capacity and memory > capacity:
        return f"memory: a rank needs {memory / 1e9:.3g} GB of {capacity / 1e9:.3g} GB"
    largest = max(shares.computing, shares.communication, shares.update)
    if largest == shares.computing:
        hidden = shares.communicating - shares.communication
        behind = f"; {_ms(hidden)} of communication hide" if shares.communicating else ""
        return f"computing: {largest / shares.step:.0%} of the step{behind}"
    if largest == shares.update:
        return f"updates: {largest / shares.step:.0%} of the step wait for memory"
    links = min(exchanged * shares.cost.per_byte, shares.communicating)
    waits = shares.communicating - links
    which = "latency" if waits > links else "bandwidth"
    return (
        f"communication, by {which}: {largest / shares.step:.0%} of the step; of {_ms(shares.communicating)} "
        f"of collectives {_ms(waits)} are latency"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
