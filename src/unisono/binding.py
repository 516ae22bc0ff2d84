"""Which cores each rank of a node computes on: those it was given, or a fair share of those that all were given.

    4 cores, 2 ranks      rank 0: 0 1      rank 1: 2 3
    2 cores, 4 ranks      nobody is bound; the ranks take turns, and it is said
    16 cores, 2 ranks     rank 0: 0 to 7, with 7 threads that compute        rank 1: 8 to 15, with 7
    2 sockets of 4 cores, 4 ranks that a launcher has bound two to a socket: each shares its socket with one other
    4 cores of two hardware threads, 0 4, 1 5, 2 6 and 3 7, 2 ranks          rank 0: 0 1 4 5      rank 1: 2 3 6 7

A launcher that has given each rank cores of its own is left alone. Ranks are given whole cores where there are enough,
of one socket as far as it goes, and compute with one thread on each: its two hardware threads share what multiplies.
With MANY cores a rank or more, those that compute leave one to the threads that exchange and load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.launch import cores
from unisono.schedules.pieces import bounds

MANY = 8
"""Cores of a rank from which on one is left to communication: it costs an eighth of the computing at most."""

TASKS = Path("/proc/self/task")
"""This process's threads, where the system is Linux."""

SYSTEM = Path("/sys/devices/system/cpu")
"""What Linux says of each core."""

Seats = Mapping[int, tuple[int, int]]
"""Where what the system calls cores sits: the socket, and the first of the hardware threads of the same real core."""


@dataclass(frozen=True)
class Share:
    """What one rank has of its node."""

    cores: tuple[int, ...]
    """Those it may use."""
    threads: int
    """That compute: one for each real core; one less where there are `MANY` and something is exchanged."""
    bound: bool
    """Whether nobody else of the node uses these cores."""


def shares_of(masks: Sequence[frozenset[int]], alone: bool) -> tuple[Share, ...]:
    """For each rank of this node its share (`share_cores`); where the system says no masks, as many threads each."""
    every = frozenset[int]().union(*masks)
    if not every:
        return (Share((), max(1, cores() // len(masks)), False),) * len(masks)
    return share_cores(masks, find_seats(every), alone)


def share_cores(masks: Sequence[frozenset[int]], seats: Seats, alone: bool = False) -> tuple[Share, ...]:
    """For each rank of a node its share, given the cores that each of them may use; `alone`: nothing is exchanged.

    >>> share_cores([frozenset({0, 1})] * 2, {})
    (Share(cores=(0,), threads=1, bound=True), Share(cores=(1,), threads=1, bound=True))
    >>> share_cores([frozenset(range(4))] * 2, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})
    (Share(cores=(0, 2), threads=1, bound=True), Share(cores=(1, 3), threads=1, bound=True))
    """
    return tuple(_share(masks, rank, seats, alone) for rank in range(len(masks)))


def _share(masks: Sequence[frozenset[int]], rank: int, seats: Seats, alone: bool) -> Share:
    """What a rank has of the cores that it may use, which those with the same mask share in their order."""
    mask = masks[rank]
    real = _real_cores(mask, seats)
    users = [other for other, one in enumerate(masks) if one & mask]
    if any(masks[other] != mask for other in users) or (mask and len(mask) < len(users)):
        return Share(tuple(sorted(mask)), max(1, len(real) // len(users)), False)
    parts = real if len(users) <= len(real) else [(core,) for threads in real for core in threads]
    first, last = bounds(len(parts), max(1, len(users)), users.index(rank) if users else 0)
    taken = tuple(sorted(core for part in parts[first:last] for core in part))
    own = {_seat(core, seats) for core in taken}
    beside = [other for other in masks if other != mask and own & {_seat(core, seats) for core in other}]
    room = len(own) // (1 + len(beside))
    return Share(taken, max(1, room - (room >= MANY and not alone)), True)


def _real_cores(mask: Iterable[int], seats: Seats) -> list[tuple[int, ...]]:
    """The hardware threads of each real core, those of a socket side by side."""
    found: dict[tuple[int, int], list[int]] = {}
    for core in sorted(mask):
        found.setdefault(_seat(core, seats), []).append(core)
    return [tuple(found[seat]) for seat in sorted(found)]


def _seat(core: int, seats: Seats) -> tuple[int, int]:
    return seats.get(core, (0, core))


def find_seats(cores: Iterable[int], system: Path = SYSTEM) -> Seats:
    """Where these sit, as far as the system says."""
    seats = {}
    for core in cores:
        folder = system / f"cpu{core}" / "topology"
        try:
            socket = int((folder / "physical_package_id").read_text())
            threads = re.findall(r"\d+", (folder / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            continue
        if threads:
            seats[core] = socket, int(threads[0])
    return seats


def crowded(masks: Sequence[frozenset[int]]) -> bool:
    """Whether ranks have fewer cores than they are; where the system does not say masks, all of its cores count."""
    every = frozenset[int]().union(*masks)
    return (len(every) or cores()) < len(masks)


def bind(share: Share) -> None:
    """Keep this process, all its threads, on the cores of its share."""
    if share.bound and share.cores and hasattr(os, "sched_setaffinity"):
        for thread in _threads_here():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, share.cores)


def report(shares: Sequence[Share]) -> str:
    """What is said of a node at the start of a run.

    >>> report(share_cores([frozenset({0, 1})] * 2, {}))
    'cores: rank 0 on 0, rank 1 on 1'
    >>> report(share_cores([frozenset({0, 1})] * 3, {}))
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
