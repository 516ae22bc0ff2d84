"""Facts of a rank's place that its system tells: host, cores, memory, cache and vectors, from the files of Linux.

    /proc/meminfo                         MemTotal:  8000000 kB    ─▶ memory_bytes, or the limit of a container
    /proc/cpuinfo                         flags: ... avx2 ...      ─▶ simd_width: float32 numbers of a register
    /sys/devices/system/cpu/cpu0/cache/   level 2, 1024K           ─▶ cache_bytes: of a thread's blocks

What a file does not say stays unknown.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unisono.launch import available_cores
from unisono.plan.machines import NodeFacts
from unisono.world import World

SIMD_WIDTHS: Mapping[str, int] = {"avx512f": 16, "avx": 8, "sse": 4, "asimd": 4}
"""float32 numbers of the widest register, by the flag of a processor; the first that it has counts."""

BLOCK_CACHE_LEVEL = "2"
"""Level of the cache that holds a thread's blocks: the largest that a core has for itself."""

UNITS: Mapping[str, int] = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class ProbedSite(NamedTuple):
    """Place and processors of a rank."""

    host: str
    cores: frozenset[int]
    """Cores that it may use."""
    system: NodeFacts
    """Facts that its node's system tells."""


def sites_of(world: World) -> list[ProbedSite]:
    """Return the place of each rank, on all ranks."""
    return world.all_gather_object(ProbedSite(socket.gethostname(), available_cores(), read_system()))


def read_system(root: Path = Path("/")) -> NodeFacts:
    """Return what the files below `root` tell of this node, all but its cores."""
    memory = memory_bytes(_read(root / "proc/meminfo"), _read(root / "sys/fs/cgroup/memory.max"))
    folders = sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*"))
    caches = [tuple(_read(folder / name).strip() for name in ("level", "type", "size")) for folder in folders]
    sizes = [cache_bytes(size) for level, kind, size in caches if level == BLOCK_CACHE_LEVEL and kind != "Instruction"]
    width = simd_width(_read(root / "proc/cpuinfo"))
    return NodeFacts(cache_bytes=max(sizes, default=0), simd_width=width, memory_bytes=memory)


def memory_bytes(meminfo: str, limit: str = "") -> float:
    """Return the bytes of memory by the text of /proc/meminfo, at most the `limit` of a control group; 0: not known."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    total = float(found[1]) * 1024 if found else 0.0
    return min(total, float(limit)) if limit.strip().isdecimal() and total else total


def cache_bytes(size: str) -> int:
    """Return the bytes of a size such as 1024K; 0 for other words."""
    found = re.fullmatch(r"(\d+)([KMG]?)", size)
    return int(found[1]) * UNITS.get(found[2], 1) if found else 0


def simd_width(cpuinfo: str) -> int:
    """Return the float32 numbers of a vector register by the text of /proc/cpuinfo; 0: not known."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return next((width for flag, width in SIMD_WIDTHS.items() if flag in flags), 0)


def _read(path: Path) -> str:
    """Return the text of a file; empty where there is none, or it may not be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
