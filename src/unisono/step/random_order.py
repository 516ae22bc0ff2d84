"""Execution of several ranks' programs in one process, in a random order that their dependencies allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from unisono.errors import StepError
from unisono.step.matching import Matching, Member
from unisono.step.program import StepProgram, graph_of

Carry = Callable[[Sequence[Member]], None]
"""Called with a task, or with all members' tasks of a collective, when it runs."""


def play_in_random_order(programs: Sequence[StepProgram], carry: Carry, seed: int = 0) -> None:
    """Play one program per rank. Each task comes after those it waits for; `seed` chooses among the ready ones.

    Raises StepError where ranks are deadlocked. Linear in the number of tasks.
    """
    chance = random.Random(seed)
    graphs = [graph_of(program) for program in programs]
    waits = [list(graph.before) for graph in graphs]
    ready = [(rank, number) for rank, counts in enumerate(waits) for number, count in enumerate(counts) if not count]
    matching = Matching(range(len(programs)))
    left = sum(map(len, programs))
    while ready:
        place = chance.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        rank, number = ready.pop()
        together = matching.arrive(Member(rank, programs[rank][number], number))
        if together:
            carry(together)
        left -= len(together)
        for one in together:
            for follower in graphs[one.rank].after[one.token]:
                waits[one.rank][follower] -= 1
                if not waits[one.rank][follower]:
                    ready.append((one.rank, follower))
    if left:
        raise StepError(f"deadlock: {', '.join(matching.waiting())}")
