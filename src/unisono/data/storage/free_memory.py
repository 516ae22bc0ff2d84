"""Free memory of nodes, and the check that a node has enough before its ranks read a pack."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono.errors import PackError
from unisono.world import World

MEMINFO = Path("/proc/meminfo")
OWN_GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
SHARED = Path("/dev/shm")


UNIFIED, LEGACY = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Files of a control group of Linux with its limit and its use, and the beginning of the names in memory.stat that
count the groups within it, too: of version 2, and of version 1, under `memory/`, still that of many clusters. There a
limit of nearly 2^63 is none."""


def free_bytes(shared: bool = False) -> float:
    """Return the bytes that processes of this node can still allocate (as shared memory); infinity without MEMINFO."""
    if not MEMINFO.exists():
        return math.inf
    lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024, *_limits()]
    if shared and SHARED.exists():
        filesystem = os.statvfs(SHARED)
        free.append(filesystem.f_bavail * filesystem.f_frsize)
    return min(free)


def _limits() -> Iterator[int]:
    """Yield the bytes that each control group of this process still allows, from its own up to the root.

    The page cache, which is freed on demand, does not count as used.
    """
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []
    paths = {"": "/"} | {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controllers, path in paths.items():
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, used, prefix = LEGACY if controllers else UNIFIED
        own_group = (GROUPS / "memory" if controllers else GROUPS) / path.lstrip("/")
        for group in (own_group, *own_group.parents):
            if (group / limit).exists() and (most := (group / limit).read_text().strip()) != "max":
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = sum(int(kinds[f"{prefix}{name}"]) for name in ("active_file", "inactive_file"))
                yield int(most) - (int((group / used).read_text()) - cached)


class FreeMemory(NamedTuple):
    """Memory of a node in bytes; infinity where it is not known."""

    ranks: int
    free: float
    """Least that a rank there finds."""
    shared: float
    """Bytes of it that can be shared."""
    needed: int = 0
    """Bytes that its ranks need together."""


def node_memory(world: World, needed: int = 0, freed: int = 0) -> list[FreeMemory]:
    """Return the memory of each node, on every rank; `needed` is this rank's need, and `freed` what its node will have
    free besides. Collective."""
    seats = world.all_gather_object((world.node, needed, free_bytes(False) + freed, free_bytes(True) + freed))
    nodes = list[FreeMemory]()
    for node in sorted({node for node, *_ in seats}):
        needs, free, shared = zip(*(seat[1:] for seat in seats if seat[0] == node), strict=True)
        nodes.append(FreeMemory(len(needs), min(free), min(shared), sum(needs)))
    return nodes


def check_free_memory(world: World, nbytes: int, shared: bool = False) -> None:
    """Raise PackError on every rank if the ranks of a node need more than it has; `nbytes` is this rank's need."""
    what = "shared memory" if shared else "memory"
    for index, node in enumerate(node_memory(world, nbytes)):
        free = node.shared if shared else node.free
        if node.needed > free:
            raise PackError(
                f"node {index} has {free / 1e9:.1f} GB of {what} free, but its ranks would hold "
                f"{node.needed / 1e9:.1f} GB of the pack; start on more nodes, store the pack partitioned "
                '(storage = "partitioned", groups = 1), or stream it (storage = "streamed"; if it is, with smaller '
                "buffer_megabytes and cache_megabytes)"
            )
