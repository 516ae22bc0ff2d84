"""The schedules: one algorithm a file, and the table of their names.

A name may have a variant after a slash, where its file lists any: "halving/round-robin".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.placement import Placement
from unisono.schedules import direct, flat, halving, hierarchical, multicolor, pipeline, ring, tree
from unisono.schedules.schedule import Family


class Entry(NamedTuple):
    """One name of the table."""

    family: Callable[[Placement, str], Family]
    """Makes the schedules for ranks that sit so; the string is the variant, empty where none is named."""
    variants: tuple[str, ...] = ()


SCHEDULES: dict[str, Entry] = {
    "ring": Entry(ring.family),
    "halving": Entry(halving.family, halving.VARIANTS),
    "direct": Entry(direct.family),
    "flat": Entry(flat.family),
    "tree": Entry(tree.family),
    "pipeline": Entry(pipeline.family),
    "multicolor": Entry(multicolor.family, multicolor.VARIANTS),
    "hierarchical": Entry(hierarchical.family, hierarchical.VARIANTS),
}


def names() -> list[str]:
    """All names, those with a variant after those without."""
    return [
        full
        for name, entry in SCHEDULES.items()
        for full in (name, *(f"{name}/{variant}" for variant in entry.variants))
    ]


def check(name: str) -> None:
    """Raise UsageError, listing the names, when there is no schedule called `name`."""
    if name not in names():
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(sorted(names()))}")


def find(name: str, placement: Placement) -> Family:
    """The schedule called `name` for ranks that sit so. Raises UsageError, listing the names, when there is none."""
    check(name)
    base, _, variant = name.partition("/")
    return SCHEDULES[base].family(placement, variant)
