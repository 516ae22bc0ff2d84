"""Schedules that differ on a placement. On one node, and between few ranks, several names have one program."""

from __future__ import annotations

import os

from unisono.launch import ranks_started
from unisono.placement import Placement
from unisono.schedules import SCHEDULES, find, names
from unisono.schedules.verify import Goal
from unisono.transports.fused import FUSED

RANKS = ranks_started(os.environ) or 1
"""Ranks of this job, known when tests are collected."""


def distinct(placement: Placement) -> list[str]:
    """Return the first of all names that have the same programs, and are played in the same way."""
    first_names: dict[object, str] = {}
    for name in names():
        family = find(name, placement)
        algorithms = {goal: algorithm for goal in Goal if (algorithm := getattr(family, goal.value)) is not None}
        programs = tuple(
            (goal, *(algorithm(rank, placement.ranks) for rank in range(placement.ranks)))
            for goal, algorithm in algorithms.items()
        )
        fused = name if any((goal.value, name) in FUSED for goal in algorithms) else ""
        first_names.setdefault((programs, SCHEDULES[name.partition("/")[0]].by_node, fused), name)
    return list(first_names.values())
