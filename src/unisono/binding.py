"""Cores of each rank of a node: its own, or a fair share of those that several ranks have in common.

    4 cores, 2 ranks      rank 0: 0 1      rank 1: 2 3
    2 cores, 4 ranks      no rank is bound; the ranks take turns, and a message says so
    16 cores, 2 ranks     rank 0: 0 to 7, with 7 compute threads             rank 1: 8 to 15, with 7
    2 sockets of 4 cores, 4 ranks that a launcher has bound two to a socket: each shares its socket with one other
    4 cores of two hardware threads, 0 4, 1 5, 2 6 and 3 7, 2 ranks          rank 0: 0 1 4 5      rank 1: 2 3 6 7

Ranks to which a launcher has given cores of their own keep them. Ranks get whole cores where there are enough, of one
socket as far as possible, and compute with one thread on each: its two hardware threads share the arithmetic units.
With COMMUNICATION_CORE_FROM cores per rank or more, the compute threads leave one core to the threads for communication
and loading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from unisono.launch import cores
from unisono.schedules.pieces import bounds

COMMUNICATION_CORE_FROM = 8
"""Cores per rank from which one is left to communication: at most an eighth of the compute threads."""

TASK_DIRECTORY = Path("/proc/self/task")
"""Directory of this process's threads, on Linux."""

CPU_DIRECTORY = Path("/sys/devices/system/cpu")
"""Directory in which Linux describes each core."""

CoreLocations = Mapping[int, tuple[int, int]]
"""Location of each logical core: its socket, and the first of the hardware threads of the same physical core."""


@dataclass(frozen=True)
class CoreShare:
    """Share of one rank in the cores of its node."""

    cores: tuple[int, ...]
    """Logical cores that the rank may use."""
    threads: int
    """Number of compute threads: one per physical core, less the core that is left to communication."""
    bound: bool
    """True if no other rank of the node uses these cores."""


def shares_of(masks: Sequence[frozenset[int]], alone: bool) -> tuple[CoreShare, ...]:
    """Return the share of each rank of this node (`share_cores`); equal thread counts if the system gives no masks."""
    usable = frozenset[int]().union(*masks)
    if not usable:
        return (CoreShare((), max(1, cores() // len(masks)), False),) * len(masks)
    return share_cores(masks, core_locations(usable), alone)


def share_cores(
    masks: Sequence[frozenset[int]], locations: CoreLocations, alone: bool = False
) -> tuple[CoreShare, ...]:
    """Return the share of each rank of a node, given the cores that each may use; `alone`: no communication.

    >>> share_cores([frozenset({0, 1})] * 2, {})
    (CoreShare(cores=(0,), threads=1, bound=True), CoreShare(cores=(1,), threads=1, bound=True))
    >>> share_cores([frozenset(range(4))] * 2, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})
    (CoreShare(cores=(0, 2), threads=1, bound=True), CoreShare(cores=(1, 3), threads=1, bound=True))
    """
    return tuple(_share(masks, rank, locations, alone) for rank in range(len(masks)))


def _share(masks: Sequence[frozenset[int]], rank: int, locations: CoreLocations, alone: bool) -> CoreShare:
    """Return the share of a rank; ranks with the same mask divide its cores in their order."""
    mask = masks[rank]
    real = _real_cores(mask, locations)
    users = [user for user, used in enumerate(masks) if used & mask]
    if any(masks[user] != mask for user in users) or (mask and len(mask) < len(users)):
        return CoreShare(tuple(sorted(mask)), max(1, len(real) // len(users)), False)
    parts = real if len(users) <= len(real) else [(core,) for threads in real for core in threads]
    first, last = bounds(len(parts), max(1, len(users)), users.index(rank) if users else 0)
    taken = tuple(sorted(core for part in parts[first:last] for core in part))
    physical = {_location(core, locations) for core in taken}
    beside = [used for used in masks if used != mask and physical & {_location(core, locations) for core in used}]
    cores = len(physical) // (1 + len(beside))
    return CoreShare(taken, max(1, cores - (cores >= COMMUNICATION_CORE_FROM and not alone)), True)


def _real_cores(mask: Iterable[int], locations: CoreLocations) -> list[tuple[int, ...]]:
    """Return the hardware threads of each physical core, those of a socket side by side."""
    threads: dict[tuple[int, int], list[int]] = {}
    for core in sorted(mask):
        threads.setdefault(_location(core, locations), []).append(core)
    return [tuple(threads[location]) for location in sorted(threads)]


def _location(core: int, locations: CoreLocations) -> tuple[int, int]:
    return locations.get(core, (0, core))


def core_locations(cores: Iterable[int], system: Path = CPU_DIRECTORY) -> CoreLocations:
    """Return the locations of these cores, as far as the system describes them."""
    locations = {}
    for core in cores:
        folder = system / f"cpu{core}" / "topology"
        try:
            socket = int((folder / "physical_package_id").read_text())
            threads = re.findall(r"\d+", (folder / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            continue
        if threads:
            locations[core] = socket, int(threads[0])
    return locations


def oversubscribed(masks: Sequence[frozenset[int]]) -> bool:
    """Return True if there are more ranks than cores; where the system gives no masks, all of its cores count."""
    usable = frozenset[int]().union(*masks)
    return (len(usable) or cores()) < len(masks)


def bind(share: CoreShare) -> None:
    """Bind this process, with all its threads, to the cores of its share."""
    if share.bound and share.cores and hasattr(os, "sched_setaffinity"):
        for thread in [int(thread.name) for thread in TASK_DIRECTORY.glob("*")] or [0]:
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(thread, share.cores)


def report(shares: Sequence[CoreShare]) -> str:
    """Return the log line about a node's cores at the start of a run.

    >>> report(share_cores([frozenset({0, 1})] * 2, {}))
    'cores: rank 0 on 0, rank 1 on 1'
    >>> report(share_cores([frozenset({0, 1})] * 3, {}))
    'cores: 3 ranks take turns on 2 cores (0 and 1); fewer ranks would be faster'
    """
    if not any(share.cores for share in shares):
        return "cores: not known on this system"
    lines = [f"rank {rank} on {_words(share.cores)}" for rank, share in enumerate(shares) if share.bound]
    turns = [share for share in shares if not share.bound]
    if turns:
        shared = sorted({core for share in turns for core in share.cores})
        remedy = "fewer ranks would be faster" if len(shared) < len(turns) else "the launcher has bound them so"
        lines.append(f"{len(turns)} ranks take turns on {len(shared)} cores ({_words(shared)}); {remedy}")
    return "cores: " + ", ".join(lines)


def _words(cores: Sequence[int]) -> str:
    """Return cores in words, with neighbours as a range: 0 to 3, 8."""
    ranges = []
    for _, run in groupby(enumerate(cores), lambda pair: pair[1] - pair[0]):
        first, *further = [core for _, core in run]
        ranges.append(f"{first} {'to' if len(further) > 1 else 'and'} {further[-1]}" if further else f"{first}")
    return ", ".join(ranges)
