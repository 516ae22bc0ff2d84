"""Overlaps, which place communication in the step: three by name, and none at all."""

from collections.abc import Mapping

from unisono.errors import UsageError
from unisono.step.overlaps.chain import chain
from unisono.step.overlaps.concurrent import concurrent
from unisono.step.overlaps.funnel import funnel
from unisono.step.overlaps.none import none
from unisono.step.overlaps.overlap import Overlap

__all__ = ["OVERLAPS", "Overlap", "find_overlap"]

OVERLAPS: Mapping[str, Overlap] = {"funnel": funnel, "concurrent": concurrent, "chain": chain, "none": none}


def find_overlap(name: str) -> Overlap:
    """Return the overlap of that name. Raises UsageError, listing the names, for an unknown one."""
    if name not in OVERLAPS:
        raise UsageError(f"there is no overlap {name!r}; there are {', '.join(OVERLAPS)}")
    return OVERLAPS[name]
