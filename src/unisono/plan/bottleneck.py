"""Bottleneck of a planned step, as a sentence: memory that is too small, samples that come too late, else the longest
of the step's parts.

step   │ computing 12 ms │ communication 30 ms │ update 1 ms │       communication: of its collectives' 36 ms, 30 ms
                                                                     are bytes on links and 6 ms are latency
batch  │ decoding 60 ms ────────────────────────────────────────▶│    starved: decoding 60 ms, a step without it 43 ms
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.plan.loading import Loading, least_step
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
    samples: Loading = Loading()
    """Loading of the step's samples."""

    @property
    def alone(self) -> float:
        """Seconds of the step without loading."""
        return self.computing + self.communication + self.update

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return max(self.alone, least_step(self.computing, self.update, self.samples))

    @property
    def loading(self) -> float:
        """Seconds that the step takes longer because of loading."""
        return self.step - self.alone


def bottleneck(shares: StepShares, exchanged: float, memory: float, capacity: float) -> str:
    """Return the sentence; `exchanged` are bytes of gradients or weights in a step, `capacity` the bytes of memory that
    a rank has (0: not known), `memory` those that it needs."""
    if capacity and memory > capacity:
        return f"memory: a rank needs {memory / 1e9:.3g} GB of {capacity / 1e9:.3g} GB"
    largest = max(shares.computing, shares.communication, shares.update)
    if shares.loading and (shares.step == shares.samples.beside or shares.loading >= largest):
        return _starved(shares)
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


def _starved(shares: StepShares) -> str:
    """Return the sentence for a step that waits for samples, or for cores that decode them, with the remedy."""
    samples = shares.samples
    if shares.step != samples.beside:
        return (
            f"decoding: {shares.loading / shares.step:.0%} of the step, on the cores that compute: more cores, or "
            "fewer pixels of a sample"
        )
    reads = samples.reading > samples.decoding
    part, remedy = (
        ("reading", "keep the samples in memory, or take a faster disk")
        if reads
        else ("decoding", "more cores, or fewer pixels of a sample")
    )
    return f"starved: {part} takes {_ms(samples.beside)}, a step without it {_ms(shares.alone)}: {remedy}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
