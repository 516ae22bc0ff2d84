"""Barrier: no rank leaves before the last has come."""

from __future__ import annotations

from unisono.call import call
from unisono.collectives.group import Group

_BARRIER = call("barrier()")


def barrier(group: Group) -> None:
    """Wait until all ranks have come."""
    if group.size == 1:
        return
    group.meet(_BARRIER)
