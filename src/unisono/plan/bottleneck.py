"""Bottleneck of a planned step, as a sentence: memory that is too small, samples that come too late, else the longest
of the step's parts; before it the slow link that costs most.

step   │ computing 12 ms │ communication 30 ms │ update 1 ms │       communication: of its collectives' 36 ms, 30 ms
                                                                     are bytes on links and 6 ms are latency
batch  │ decoding 60 ms ────────────────────────────────────────▶│    starved: decoding 60 ms, a step without it 43 ms

All ranks wait for a slow link. A step of 100 ms that is one of 71 ms without node 3's slow link loses 29 ms to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.plan.run_row import RunPlan

LEAST_COST = 0.01
"""Share of a step from which a slow link is named."""


def bottleneck(row: RunPlan, links: float, capacity: float) -> str:
    """Return the sentence for a row; `links` are the seconds of its collectives that are bytes on links, `capacity` the
    bytes of memory that a rank has (0: not known)."""
    memory, step = row.memory.total, row.step
    if capacity and memory > capacity:
        return f"memory: a rank needs {memory / 1e9:.3g} GB of {capacity / 1e9:.3g} GB"
    largest = max(row.computing, row.communication, row.update)
    starved = isclose(step, max(row.reading, row.decoding))
    if row.loading and (starved or row.loading >= largest):
        return _starved(row) if starved else _decoding(row)
    if largest == row.computing:
        hidden = row.communicating - row.communication
        behind = f"; {_ms(hidden)} of communication hide" if row.communicating else ""
        return f"computing: {largest / step:.0%} of the step{behind}"
    if largest == row.update:
        return f"updates: {largest / step:.0%} of the step wait for memory"
    links = min(links, row.communicating)
    waits = row.communicating - links
    which = "latency" if waits > links else "bandwidth"
    return (
        f"communication, by {which}: {largest / step:.0%} of the step; of {_ms(row.communicating)} "
        f"of collectives {_ms(waits)} are latency"
    )


def slow_link(slow: Mapping[int, float], step: float, without: float) -> str:
    """Return a sentence with the node whose link is slowest, by these factors; "" if that costs the step little.

    `without` are the seconds of a step whose links are all equal.

    >>> slow_link({3: 4.0}, 0.1, 0.071)
    "node 3's link, 4 times slower: 29 ms of the step; without it 1.41 times as fast"
    """
    if step - without < LEAST_COST * step:
        return ""
    node = max(slow, key=lambda one: slow[one])
    others = f" (the slowest of {len(slow)})" if len(slow) > 1 else ""
    return (
        f"node {node}'s link{others}, {slow[node]:g} times slower: {_ms(step - without)} of the step; "
        f"without it {step / without:.3g} times as fast"
    )


def _decoding(row: RunPlan) -> str:
    """Return the sentence for a step that waits for cores that decode."""
    return (
        f"decoding: {row.loading / row.step:.0%} of the step, on the cores that compute: more cores, or fewer pixels "
        "of a sample"
    )


def _starved(row: RunPlan) -> str:
    """Return the sentence for a step that waits for samples, with the remedy."""
    reads = row.reading > row.decoding
    part, remedy = (
        ("reading", "keep the samples in memory, or take a faster disk")
        if reads
        else ("decoding", "more cores, or fewer pixels of a sample")
    )
    longest = _ms(max(row.reading, row.decoding))
    return f"starved: {part} takes {longest}, a step without it {_ms(row.step - row.loading)}: {remedy}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
