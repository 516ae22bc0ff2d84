"""Matching of tasks of different ranks that are one collective, or one message: rule 3 of `program.py`.

rank 0   allreduce 1 ──┐        allreduce 2 ─┐           send 1 to 2 ───┐
rank 1   allreduce 1 ──┤ first  allreduce 2 ─┤ second                   │
rank 2   allreduce 1 ──┘        allreduce 2 ─┘           receive 1 ─────┘
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from unisono.errors import StepError
from unisono.step.program import RankGroup, Role, StepProgram, Task, graph_of


class Member(NamedTuple):
    """Task that a rank has reached."""

    rank: int
    task: Task
    token: Any = None
    """Label that the caller gave it."""


Carry = Callable[[Sequence[Member]], None]
"""Called with a task, or with all members' tasks of a collective, when it runs."""


class Matching:
    """Collector of the tasks that ranks reach. It returns those that run together."""

    def __init__(self, ranks: Collection[int]) -> None:
        """Match the tasks of `ranks`, those that are played. Others of a group are assumed to arrive at the same
        time."""
        self._ranks = frozenset(ranks)
        self._members: dict[RankGroup, tuple[int, ...]] = {}
        self._arrived: dict[RankGroup, dict[int, deque[Member]]] = {}
        self._sends: dict[tuple[RankGroup, int | None], deque[Member]] = {}
        self._receives: dict[tuple[RankGroup, int], deque[Member]] = {}

    def arrive(self, member: Member) -> Sequence[Member]:
        """Add a task that its rank has reached. Return all tasks that run together now, or none yet."""
        task = member.task
        if task.group is None or task.operation.role is Role.LOCAL:
            return (member,)
        if task.operation.role is Role.COLLECTIVE:
            return self._collective(task.group, member)
        return self._message(task.group, member)

    def waiting(self) -> list[str]:
        """Return a description of each rank that waits and its task."""
        members = [one for arrive in self._arrived.values() for queue in arrive.values() for one in queue]
        members += [one for queues in (self._sends, self._receives) for queue in queues.values() for one in queue]
        return [f"rank {one.rank} in {one.task}" for one in members]

    def _collective(self, group: RankGroup, member: Member) -> Sequence[Member]:
        members = self._members.get(group)
        if members is None:
            members = self._members[group] = tuple(rank for rank in group.ranks if rank in self._ranks)
            self._arrived[group] = {rank: deque() for rank in members}
        arrive = self._arrived[group]
        arrive[member.rank].append(member)
        if not all(arrive.values()):
            return ()
        return [arrive[rank].popleft() for rank in members]

    def _message(self, group: RankGroup, member: Member) -> Sequence[Member]:
        peer, role = member.task.peer, member.task.operation.role
        if peer is not None and peer not in self._ranks:
            return (member,)
        if role is Role.SEND:
            waiting = self._receives.setdefault((group, peer if peer is not None else -1), deque())
            for other in waiting:
                if other.task.peer in (None, member.rank):
                    waiting.remove(other)
                    return (member, other)
            self._sends.setdefault((group, peer), deque()).append(member)
            return ()
        offered = self._sends.setdefault((group, member.rank), deque())
        for other in offered:
            if peer in (None, other.rank):
                offered.remove(other)
                return (other, member)
        self._receives.setdefault((group, member.rank), deque()).append(member)
        return ()


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
