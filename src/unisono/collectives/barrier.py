"""Barrier: no rank leaves before the last has come."""

from __future__ import annotations

import os

from unisono.collectives.group import Group
from unisono.transports.windows import call

_BARRIER = call("barrier()")


def barrier(group: Group) -> None:
    """Wait until all ranks have come."""
    if group.size == 1:
        return
    if group.one_node:
        group.node_memory.signals.meet(_BARRIER)
        return
    request = group.comm.Ibarrier()
    while not request.Test():
        os.sched_yield()
