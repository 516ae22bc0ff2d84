"""Barrier: no rank leaves before the last has entered."""

from __future__ import annotations

from unisono.call import call_of
from unisono.collectives.group import Group

_BARRIER = call_of("barrier()")


def barrier(group: Group) -> None:
    """Wait until all ranks have entered the barrier."""
    if group.size == 1:
        return
    group.barrier(_BARRIER)
