"""Which cores each rank of a node computes on: those it was given, or a fair share of those that all were given.

    4 cores, 2 ranks      rank 0: 0 1      rank 1: 2 3
    2 cores, 4 ranks      nobody is bound; the ranks take turns, and it is said
    16 cores, 2 ranks     rank 0: 0 to 6 compute, 7 exchanges        rank 1: 8 to 14, 15
    2 sockets of 4 cores, 4 ranks that a launcher has bound two to a socket: each shares its socket with one other

A launcher that has given each rank cores of its own is left alone. With MANY cores a rank or more, one is left to the
threads that exchange and load.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.schedules.pieces import bounds

MANY = 8
"""Cores of a rank from which on one is left to communication: it costs an eighth of the computing at most."""


TASKS = Path("/proc/self/task")
"""This process's threads, where the system is Linux."""


@dataclass(frozen=True)
class Share:
    """What one rank has of its node."""

    cores: tuple[int, ...]
    """Those it may use; the last is left to communication where there are `MANY`."""
    threads: int
    """That compute."""
    bound: bool
    """Whether nobody else of the node uses these cores."""


def share_cores(masks: Sequence[frozenset[int]]) -> tuple[Share, ...]:
    """For each rank of a node its share, given the cores that each of them may use.

    >>> share_cores([frozenset({0, 1}), frozenset({0, 1})])
    (Share(cores=(0,), threads=1, bound=True), Share(cores=(1,), threads=1, bound=True))
    """
    return tuple(_share(masks, rank) for rank in range(len(masks)))


def _share(masks: Sequence[frozenset[int]], rank: int) -> Share:
    """What a rank has of the cores that it may use, which those with the same mask share in their order."""
    mask, cores = masks[rank], sorted(masks[rank])
    users = [other for other, one in enumerate(masks) if one & mask]
    if any(masks[other] != mask for other in users) or (cores and len(cores) < len(users)):
        return Share(tuple(cores), max(1, len(cores) // len(users)), False)
    first, last = bounds(len(cores), max(1, len(users)), users.index(rank) if users else 0)
    return Share(tuple(cores[first:last]), _threads(last - first), True)


def own_cores() -> frozenset[int]:
    """Those that this process may use; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def bind(share: Share) -> None:
    """Keep this process, all its threads, on the cores of its share."""
    if share.bound and share.cores and hasattr(os, "sched_setaffinity"):
        for thread in _threads_here():
            os.sched_setaffinity(thread, share.cores)


def report(shares: Sequence[Share]) -> str:
    """What is said of a node at the start of a run.

    >>> report(share_cores([frozenset({0, 1})] * 2))
    'cores: rank 0 on 0, rank 1 on 1'
    >>> report(share_cores([frozenset({0, 1})] * 3))
    'cores: 3 ranks take turns on 2 cores (0 and 1); fewer ranks would be faster'
    """
    if not any(share.cores for share in shares):
        return "cores: not known on this system"
    said = [f"rank {rank} on {_words(share.cores)}" for rank, share in enumerate(shares) if share.bound]
    turns = [share for share in shares if not share.bound]
    if turns:
        every = sorted({core for share in turns for core in share.cores})
        remedy = "fewer ranks would be faster" if len(every) < len(turns) else "the launcher has bound them so"
        said.append(f"{len(turns)} ranks take turns on {len(every)} cores ({_words(every)}); {remedy}")
    return "cores: " + ", ".join(said)


def _threads(cores: int) -> int:
    return max(1, cores - 1 if cores >= MANY else cores)


def _threads_here() -> Iterable[int]:
    return [int(thread.name) for thread in TASKS.iterdir()] if TASKS.is_dir() else [0]


def _words(cores: Sequence[int]) -> str:
    """Cores side by side as a stretch: 0 to 3, 8."""
    stretches: list[list[int]] = []
    for core in cores:
        if stretches and core == stretches[-1][-1] + 1:
            stretches[-1].append(core)
        else:
            stretches.append([core])
    words = []
    for stretch in stretches:
        between = "" if len(stretch) == 1 else f" and {stretch[-1]}" if len(stretch) == 2 else f" to {stretch[-1]}"
        words.append(f"{stretch[0]}{between}")
    return ", ".join(words)
