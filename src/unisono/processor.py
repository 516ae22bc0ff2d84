"""The processor: its name, as a device and on sale, and the use of the ranks' cores by other processes.

Properties are read from /proc/cpuinfo on Linux; elsewhere only the name is known. Use is computed from counters of the
system at two times:

    core 0   rank 0 ████████   other processes ██████   idle ██        busy in all, and stolen: /proc/stat
             CPU time of rank 0: getrusage                             the rest of the busy time is that of others

Worked example: 2 ranks of a node share 2 cores for 1 s. The cores were busy for 2 s in all, the ranks for 0.6 s each:
others took 0.8 of 2 s, 40% of each rank's cores. A machine with idle cores is not shared in this sense: others count
only as far as threads of the rank waited for a core (`schedstat`).

Where a system has no such files, nothing is known of others, and none are reported.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.launch import available_cores

AUTO, HOST = "auto", "cpu"
"""Names of devices in a recipe: this node's accelerators, one for each of its ranks, or else the processor; and the
processor."""

SHARED = 0.1
"""Share of a rank's cores from which they count as shared with other processes."""

MORE_SWITCHES = 2
"""Ratio of involuntary context switches from which they count as more."""

TICK = 0.01
"""Seconds of a core that may be counted too late: the system counts in such ticks."""


class Counters(NamedTuple):
    """Counters of a rank at one time, or their differences between two times, in seconds."""

    machine: str
    """Identity of the running kernel: ranks with the same one share cores. Empty where the system has none."""
    wall: float
    cpu: float
    """CPU time of all threads."""
    delayed: float | None
    """Time in which threads could have run and had no core; None where the system does not tell."""
    switches: int
    """Involuntary context switches."""
    cores: dict[int, tuple[float, float]]
    """Busy time of each core that the rank may use, and time that the hypervisor stole from it."""


@dataclass(frozen=True)
class ProcessorUse:
    """Use of the ranks' cores by others: that of the rank to which they left least."""

    others: float = 0.0
    """Share, 0 to 1, that other processes took."""
    stolen: float = 0.0
    """Share that the hypervisor took."""
    switches: float = 0.0
    """Involuntary context switches in a second, also those between threads of the rank."""

    @property
    def taken(self) -> float:
        """Share that was not the rank's own."""
        return self.others + self.stolen

    @property
    def shared(self) -> bool:
        """True where others took so much that steps are longer."""
        return self.taken >= SHARED


ALONE = ProcessorUse()
"""Use where others took nothing, and where nothing is known of them."""


def read_counters() -> Counters:
    used, machine = resource.getrusage(resource.RUSAGE_SELF), ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Counters(machine, time.perf_counter(), used.ru_utime + used.ru_stime, _delayed(), used.ru_nivcsw, _cores())


def use_since(before: Counters, after: Counters | None = None) -> Counters:
    """Return the use of a rank's cores from `before` to `after`, else until now: of those that it might use in both."""
    if after is None:
        after = read_counters()
    cores = {
        core: (busy - before.cores[core][0], stolen - before.cores[core][1])
        for core, (busy, stolen) in after.cores.items()
        if core in before.cores
    }
    delayed = None if before.delayed is None or after.delayed is None else after.delayed - before.delayed
    wall, cpu, switches = after.wall - before.wall, after.cpu - before.cpu, after.switches - before.switches
    return Counters(after.machine, wall, cpu, delayed, switches, cores)


def processor_use(ranks: Sequence[Counters]) -> ProcessorUse:
    """Return the use of the ranks' cores by others, from that of every rank."""
    uses = [_use_of(rank, ranks) for rank in ranks]
    return max(uses, key=lambda use: (use.taken, use.switches), default=ALONE)


def compare_use(first: ProcessorUse | None, later: ProcessorUse) -> str:
    """Return what others took of the ranks' cores, later and in the first steps (None: not known); empty where that was
    little.

    >>> compare_use(ProcessorUse(), ProcessorUse(others=0.5))
    "other processes took 50% of the ranks' cores; in the first steps 0%"
    """
    if first is None:
        return describe(later) if later.shared else ""
    if first.shared or later.shared:
        return f"{describe(later)}; in the first steps {first.taken:.0%}"
    if later.switches > MORE_SWITCHES * first.switches > 0:
        return f"ranks lost their cores {later.switches:,.0f} times a second, {first.switches:,.0f} in the first steps"
    return ""


def describe(use: ProcessorUse) -> str:
    """Return what others took, as words.

    >>> describe(ProcessorUse(others=0.3, stolen=0.2))
    "other processes took 30% of the ranks' cores, the hypervisor 20%"
    """
    hypervisor = f", the hypervisor {use.stolen:.0%}" if use.stolen >= 0.01 else ""
    return f"other processes took {use.others:.0%} of the ranks' cores{hypervisor}"


def _use_of(rank: Counters, ranks: Sequence[Counters]) -> ProcessorUse:
    """Return the use of one rank's cores by processes other than the ranks."""
    if not rank.cores or rank.wall <= 0:
        return ALONE
    mine = rank.cores.keys()
    busy, stolen = map(sum, zip(*rank.cores.values(), strict=True))
    users = [user for user in ranks if user.machine == rank.machine and user.cores]
    own = sum(user.cpu * len(mine & user.cores.keys()) / len(user.cores) for user in users)
    possible = rank.wall * len(mine)
    others = max(0.0, busy - own - TICK * len(mine)) / possible
    if rank.delayed is not None:
        others = min(others, max(0.0, rank.delayed / rank.wall))
    return ProcessorUse(others, min(1.0 - others, stolen / possible), rank.switches / rank.wall)


def _cores() -> dict[int, tuple[float, float]]:
    """Return the busy and the stolen seconds of each core that this process may use."""
    seconds = dict[int, tuple[float, float]]()
    with suppress(OSError):
        cores, tick = available_cores(), os.sysconf("SC_CLK_TCK")
        for line in Path("/proc/stat").read_text().splitlines():
            name, *times = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, _, _, interrupts, soft, stolen, *_ = map(int, times)
                seconds[int(name[3:])] = (user + nice + system + interrupts + soft) / tick, stolen / tick
    return seconds


def _delayed() -> float | None:
    """Return the seconds in which threads of this process could have run and had no core."""
    nanoseconds = []
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            nanoseconds.append(int(thread.read_text().split()[1]))
    return 1e-9 * sum(nanoseconds) if nanoseconds else None


CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
"""Names of CPU flags for bfloat16 arithmetic: in tiles (Intel's AMX), in vectors (x86), and ARM's."""


class Processor(NamedTuple):
    """Name of a processor, and what it is fast at."""

    name: str
    bfloat16: bool = False
    """True where bfloat16 is faster than float32."""


def processor() -> Processor:
    return parse(CPUINFO.read_text()) if CPUINFO.is_file() else Processor(platform.processor() or platform.machine())


def parse(cpuinfo: str) -> Processor:
    """Return the processor described by the text of /proc/cpuinfo.

    >>> parse("model name : Xeon\\nflags : avx2 amx_bf16\\n")
    Processor(name='Xeon', bfloat16=True)
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return Processor(fields.get("model name") or platform.machine(), not BFLOAT16_FLAGS.isdisjoint(flags))
