"""Plan of a probe, and the seconds that were read, as data.

The plan has parts with their share of the time, and the probes of each part, the cheapest first.

    0 ── links ── products ── memory ── decoding ── disk ── collectives ──▶ seconds
         15%      25%         5%        5%          5%      45%

A part ends at the sum of the shares up to it, so that time which one leaves over is the next one's. A probe of a part
has a share of what is left in proportion to the root of its work: long ones have more time, short ones more trials.

Worked example: 24 s are left for two probes of 1 and 16 MiB. Their roots are 1 and 4: the first has 4.8 s. If a call of
it takes 0.25 s, 18 trials follow the first call; the other probe then has 19.2 s, and is expected to take 4 s a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from types import MappingProxyType
from typing import NamedTuple

import torch

from unisono.data.loading import PROCESSOR
from unisono.measure.links import Links
from unisono.measure.probes import (
    Probe,
    collective_probe,
    copy_probe,
    decoding_probe,
    disk_probe,
    memory_probe,
    product_probe,
)
from unisono.measure.timing import LONG_CALL_SECONDS, MAX_TRIALS
from unisono.network.choice import ChoiceRow
from unisono.plan.choose import MEASURED_BUCKET_BYTES
from unisono.plan.machines import BFLOAT16, CONVOLUTION_KIND, FLOAT32, FLOAT32_WIRE, LINEAR_KIND

SHARES = {
    "links": 0.15,
    "products": 0.25,
    "memory": 0.05,
    "decoding": 0.05,
    "disk": 0.05,
    "collectives": 0.45,
}
"""Share of the time of each part, in the order in which they are measured."""

COLLECTIVE_BYTES = (MEASURED_BUCKET_BYTES[0], 2 << 20, MEASURED_BUCKET_BYTES[1])
"""Payloads in bytes: those of a run's own measurements, and one between them."""

NARROW_WIRE = "bfloat16"
"""Wire of 16 bits that is measured beside float32."""

SUM_BYTES = 64 << 20
"""Bytes of each tensor of a sum: more than caches hold."""

DISK_BYTES = (8 << 20, 64 << 20, 256 << 20)
"""Bytes of files: the largest that there is time for counts."""

DTYPES_OF_A_DEVICE = (FLOAT32, BFLOAT16)
"""Number formats of products on a device; on the host, float32 alone."""

LINEAR_SIZES = (
    *((8, 256, 256), (64, 256, 256), (8, 1024, 1024), (64, 1024, 1024)),
    *((512, 512, 2048), (512, 1024, 1024), (64, 4096, 4096)),
)
"""Rows of a rank, inputs and outputs of linear layers: short and tall, narrow and wide."""

CONVOLUTION_SIZES = (
    *((32, 16, 16, 32, 3), (32, 64, 64, 8, 3), (8, 3, 64, 56, 7), (8, 64, 64, 56, 1), (8, 64, 64, 56, 3)),
    *((8, 128, 128, 28, 3), (8, 256, 1024, 14, 1), (8, 256, 256, 14, 3), (8, 512, 512, 7, 3)),
)
"""Samples of a rank, input channels, output channels, side of the output, side of the kernel: those of residual
networks on images of 32 and of 224 pixels."""


class ProbePart(NamedTuple):
    """Part of a probe."""

    name: str
    ends: float
    """Seconds since the beginning at which it ends."""
    probes: tuple[Probe, ...]
    """Probes, the cheapest first; none for the links, which `links.py` measures as a whole."""


class ProbePlan(NamedTuple):
    """Parts that are measured, and the reason for each that is not."""

    parts: tuple[ProbePart, ...]
    left_out: tuple[str, ...]


def plan_probe(
    seconds: float, nodes: int, ranks: int, disk: bool, device: torch.device = PROCESSOR, bfloat16: bool = True
) -> ProbePlan:
    """Return the parts for that many nodes and ranks in all; `disk` is True where a folder to read from is given.

    On a `device`, products are its own, in bfloat16 too where that is True, and its memory and copies are measured.
    """
    on_host = device == PROCESSOR
    dtypes = DTYPES_OF_A_DEVICE[: 1 if on_host or not bfloat16 else 2]
    reasons = {
        "links": "one node has no links" if nodes == 1 else "",
        "collectives": "a single rank has no collectives" if ranks == 1 else "",
        "disk": "" if disk else "no folder was given: --disk FOLDER",
    }
    probes: dict[str, Sequence[Probe]] = {
        "links": [],
        "products": [
            product_probe(kind, *sizes, dtype=dtype, device=device)
            for kind, of_kind in ((LINEAR_KIND, LINEAR_SIZES), (CONVOLUTION_KIND, CONVOLUTION_SIZES))
            for sizes in of_kind
            for dtype in dtypes
        ],
        "memory": [
            memory_probe(SUM_BYTES),
            *([] if on_host else [memory_probe(SUM_BYTES, device)]),
            *([] if on_host else [copy_probe(kind, SUM_BYTES, device) for kind in ("to_host", "to_device")]),
        ],
        "decoding": [decoding_probe(500, 375)],
        "disk": [disk_probe(nbytes) for nbytes in DISK_BYTES],
        "collectives": list(_collectives(nodes)),
    }
    ends = accumulate(SHARES.values())
    parts = tuple(
        ProbePart(name, seconds * end, tuple(sorted(probes[name], key=lambda probe: probe.work)))
        for name, end in zip(SHARES, ends, strict=True)
        if not reasons.get(name)
    )
    return ProbePlan(parts, tuple(f"{name}: {reason}" for name, reason in reasons.items() if reason))


def _collectives(nodes: int) -> Iterator[Probe]:
    """Yield the collectives of BSP and of Sharded, whose weights are not encoded. Within a node nothing is encoded."""
    for nbytes in COLLECTIVE_BYTES:
        for wire in (FLOAT32_WIRE, NARROW_WIRE)[: 1 + (nodes > 1)]:
            yield collective_probe("allreduce", wire, nbytes)
            yield collective_probe("reduce_scatter", wire, nbytes)
        yield collective_probe("all_gather", FLOAT32_WIRE, nbytes)


def share_of(remaining: float, works: Sequence[float]) -> float:
    """Return the seconds of the first of the probes with these works, of those that remain for all."""
    return max(0.0, remaining) * sqrt(works[0]) / sum(map(sqrt, works))


def fits(expected: float, remaining: float) -> bool:
    """Return True if a probe whose calls are expected to take so long can be called twice."""
    return 2 * expected <= remaining


def trials(first: float, left: float) -> int:
    """Return the number of trials in `left` seconds after a first call of so many seconds: 1 to MAX_TRIALS, or 0 after
    a long first call, which counts as a trial itself.

    >>> trials(0.01, 1.0), trials(0.2, 0.1), trials(0.5, 1.2), trials(2.0, 1.0)
    (41, 1, 2, 0)
    """
    least = 0 if first > LONG_CALL_SECONDS else 1
    return max(least, min(MAX_TRIALS, int(max(0.0, left) / max(first, 1e-9))))


Trial = tuple[tuple[float, ...], ...]
"""Seconds of a call by rank: of each of its passes; none where the rank took no part."""


class ProbeReading(NamedTuple):
    """Seconds of a probe, the same on every rank."""

    probe: Probe
    trials: tuple[Trial, ...]
    preparation: float
    """Seconds before the first call."""
    schedule: str = ""
    """Schedule of a collective."""


class ProbeFindings(NamedTuple):
    """Findings of a whole plan, or of tuning, which measures links and has the rows."""

    links: Links | None
    readings: tuple[ProbeReading, ...]
    left_out: tuple[str, ...]
    """Reason for each part or probe that was not measured."""
    seconds: float
    """Seconds that all took."""
    rows: Mapping[str, tuple[ChoiceRow, ...]] = MappingProxyType({})
    """Rows of the table of choices, by collective."""


def slowest(trial: Sequence[Sequence[float]]) -> float:
    """Return the seconds of the slowest rank, all its passes.

    >>> slowest([(1.0, 2.0), (), (2.5,)])
    3.0
    """
    return max(map(sum, trial), default=0.0)
