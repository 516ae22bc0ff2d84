"""Schedules: one algorithm per file, and the table of their names.

A name may have a variant after a slash, if its file lists any: "halving/round-robin". In the docstrings
p is the number of ranks, n that of a payload's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.placement import Placement
from unisono.schedules import (
    circulant,
    direct,
    flat,
    halving,
    hierarchical,
    leader,
    multicolor,
    pipeline,
    ring,
    split_tree,
    supernodes,
    tree,
)
from unisono.schedules.hierarchical import nodes_of
from unisono.schedules.schedule import Algorithm, Family


class Entry(NamedTuple):
    """Entry of the table for one name."""

    family: Callable[[Placement, str], Family]
    """Function that makes the schedules for a placement and a variant; an empty string is the default variant."""
    worth: Callable[[str, Placement, str], bool] = lambda *_: False
    """Function (collective, placement, variant): True if it may be the fastest on these nodes and is worth a trial. By
    default none is: only short collectives use it, without a trial; longer ones take fewer bytes by others."""
    variants: tuple[str, ...] = ()
    by_node: bool = False
    """True if it sums within nodes first; those transfers go through the shared memory of a node."""


SCHEDULES: dict[str, Entry] = {
    "tree": Entry(tree.family, tree.worth, tree.VARIANTS),
    "halving": Entry(halving.family, halving.worth, halving.VARIANTS),
    "ring": Entry(ring.family, ring.worth),
    "direct": Entry(direct.family, direct.worth),
    "flat": Entry(flat.family),
    "multicolor": Entry(multicolor.family, multicolor.worth, multicolor.VARIANTS),
    "pipeline": Entry(pipeline.family, pipeline.worth),
    "circulant": Entry(circulant.family),
    "split_tree": Entry(split_tree.family),
    "supernodes": Entry(supernodes.family, supernodes.worth),
}
"""One row per schedule and file. `hierarchical` and `leader` can use each of them between nodes."""


def names() -> list[str]:
    """Return all names; those of a schedule's variants follow its own."""
    return [f"{name}/{variant}".rstrip("/") for name, entry in SCHEDULES.items() for variant in ("", *entry.variants)]


def _by_node(levels: ModuleType) -> Entry:
    """Return the entry of a schedule that uses another one, by default `levels.BETWEEN`, between the nodes."""
    between = levels.BETWEEN

    def family(placement: Placement, variant: str) -> Family:
        made: Family = levels.family(placement, find(variant or between, nodes_of(placement)))
        return made

    def worth(collective: str, placement: Placement, variant: str) -> bool:
        name, _, inner = (variant or between).partition("/")
        several = len(placement.nodes) < placement.ranks
        return several and SCHEDULES[name].worth(collective, nodes_of(placement), inner)

    return Entry(family, worth, tuple(name for name in _BETWEEN if name != between), by_node=True)


_BETWEEN = names()
SCHEDULES |= {"hierarchical": _by_node(hierarchical), "leader": _by_node(leader)}


def candidates(collective: str, placement: Placement) -> list[str]:
    """Return the schedules that are worth a trial for a placement on several nodes."""

    def is_candidate(name: str) -> bool:
        base, _, variant = name.partition("/")
        worth = SCHEDULES[base].worth(collective, placement, variant)  # a schedule of many ranks takes long to make
        return worth and getattr(find(name, placement), collective) is not None

    return [name for name in names() if is_candidate(name)]


def check(name: str) -> None:
    """Raise UsageError, listing the names, if there is no schedule called `name`."""
    if name not in names():
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(sorted(names()))}")


def find(name: str, placement: Placement) -> Family:
    """Return the schedule called `name` for a placement. Raises UsageError, listing the names, if there is none."""
    check(name)
    base, _, variant = name.partition("/")
    return SCHEDULES[base].family(placement, variant)


def algorithm_of(name: str, collective: str, placement: Placement) -> Algorithm:
    """Return a schedule's algorithm for a collective. Raises UsageError where there is none."""
    algorithm: Algorithm | None = getattr(find(name, placement), collective)
    if algorithm is None:
        raise UsageError(f"the schedule {name!r} has no {collective}")
    return algorithm
