"""Cores of each rank of a node: those that it was given, or a fair share of those that several ranks were given.

    4 cores, 2 ranks      rank 0: 0 1      rank 1: 2 3
    2 cores, 4 ranks      nobody is bound; the ranks take turns, and it is said
    16 cores, 2 ranks     rank 0: 0 to 7, with 7 threads that compute        rank 1: 8 to 15, with 7
    2 sockets of 4 cores, 4 ranks that a launcher has bound two to a socket: each shares its socket with one other
    4 cores of two hardware threads, 0 4, 1 5, 2 6 and 3 7, 2 ranks          rank 0: 0 1 4 5      rank 1: 2 3 6 7

Ranks to which a launcher has given cores of their own keep them. Ranks get whole cores where there are enough, of one
socket as far as possible, and compute with one thread on each: its two hardware threads share the arithmetic units.
With MANY cores per rank or more, the computing threads leave one core to the threads that exchange and load.
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
"""Cores per rank from which on one is left to communication: it costs an eighth of the computing at most."""

TASKS = Path("/proc/self/task")
"""Directory of this process's threads, on Linux."""

SYSTEM = Path("/sys/devices/system/cpu")
"""Directory in which Linux describes each core."""

Seats = Mapping[int, tuple[int, int]]
"""Location of each logical core: its socket, and the first of the hardware threads of the same physical core."""


@dataclass(frozen=True)
class Share:
    """Share of one rank in the cores of its node."""

    cores: tuple[int, ...]
    """Logical cores that the rank may use."""
    threads: int
    """Number of computing threads: one per physical core; one less where there are `MANY` and data is exchanged."""
    bound: bool
    """True if no other rank of the node uses these cores."""


def shares_of(masks: Sequence[frozenset[int]], alone: bool) -> tuple[Share, ...]:
    """Return the share of each rank of this node (`share_cores`); equal thread counts if the system gives no masks."""
    every = frozenset[int]().union(*masks)
    if not every:
        return (Share((), max(1, cores() // len(masks)), False),) * len(masks)
    return share_cores(masks, find_seats(every), alone)


def share_cores(masks: Sequence[frozenset[int]], seats: Seats, alone: bool = False) -> tuple[Share, ...]:
    """Return the share of each rank of a node, given the cores that each may use; `alone`: nothing is exchanged.

    >>> share_cores([frozenset({0, 1})] * 2, {})
    (Share(cores=(0,), threads=1, bound=True), Share(cores=(1,), threads=1, bound=True))
    >>> share_cores([frozenset(range(4))] * 2, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})
    (Share(cores=(0, 2), threads=1, bound=True), Share(cores=(1, 3), threads=1, bound=True))
    """
    return tuple(_share(masks, rank, seats, alone) for rank in range(len(masks)))


def _share(masks: Sequence[frozenset[int]], rank: int, seats: Seats, alone: bool) -> Share:
    """Return the share of a rank; ranks with the same mask divide its cores in their order."""
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
    """Return the hardware threads of each physical core, those of a socket side by side."""
    found: dict[tuple[int, int], list[int]] = {}
    for core in sorted(mask):
        found.setdefault(_seat(core, seats), []).append(core)
    return [tuple(found[seat]) for seat in sorted(found)]


def _seat(core: int, seats: Seats) -> tuple[int, int]:
    return seats.get(core, (0, core))


def find_seats(cores: Iterable[int], system: Path = SYSTEM) -> Seats:
    """Return the locations of these cores, as far as the system describes them."""
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
    """Return True if there are more ranks than cores; where the system gives no masks, all of its cores count."""
    every = frozenset[int]().union(*masks)
    return (len(every) or cores()) < len(masks)


def bind(share: Share) -> None:
    """Bind this process, with all its threads, to the cores of its share."""
    if share.bound and share.cores and hasattr(os, "sched_setaffinity"):
        for thread in _threads_here():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, share.cores)


def report(shares: Sequence[Share]) -> str:
    """Return the log line about a node's cores at the start of a run.

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
    """Return cores in words, with neighbours as a range: 0 to 3, 8."""
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
