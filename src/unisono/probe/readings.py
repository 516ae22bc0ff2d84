"""Readings of a probe, as data: seconds by trial and rank, and all that was found, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.probe.probes import Probe
from unisono.tuning.links import Links

Trial = tuple[tuple[float, ...], ...]
"""Seconds of a call by rank: of each of its passes; none where the rank took no part."""


class ProbeReading(NamedTuple):
    """Seconds of a probe."""

    probe: Probe
    trials: tuple[Trial, ...]
    preparation: float
    """Seconds before the first call."""
    schedule: str = ""
    """Schedule of a collective."""


class ProbeFindings(NamedTuple):
    """Findings of a whole plan."""

    links: Links | None
    readings: tuple[ProbeReading, ...]
    left_out: tuple[str, ...]
    """Reason for each part or probe that was not measured."""
    seconds: float
    """Seconds that all took."""


def slowest(trial: Sequence[Sequence[float]]) -> float:
    """Return the seconds of the slowest rank, all its passes.

    >>> slowest([(1.0, 2.0), (), (2.5,)])
    3.0
    """
    return max(map(sum, trial), default=0.0)
