"""Supervision of ranks during their start: reports which one dies or is stopped before their witness is ready.

    unisono train ── starts ──▶ mpiexec ──▶ proxy ──▶ ranks 0, 1, 2 ──▶ witness
          └── watches their processes ─────────────────────┘    until it is ready

A rank imports Python packages for seconds before it can report an error itself. Until the witness (`witness.py`) is
ready, the command that started the launcher finds the ranks below it in /proc, by the variable that numbers them. A
launcher ends all ranks when one dies. If it does not, or if a rank stays stopped, they are ended here. The
MPI library's files in /dev/shm and /tmp are then removed too. Linux only; elsewhere there is no supervision.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unisono import witness
from unisono.launch import RANK_VARIABLES

POLL_SECONDS, FIRST_POLL_SECONDS = 0.1, 0.01
"""Seconds between two polls; the second until all ranks have been found."""

GRACE_SECONDS = 3.0
"""Time that a launcher has to end all ranks after one has died."""

STOPPED_REPORT_SECONDS = 10.0
"""Time after which a stopped rank is reported."""

PROC = Path("/proc")

STOPPED = ("T", "t")
"""States of a process that is stopped, by a signal or a debugger (proc(5))."""

MPICH_FILES = (("/dev/shm", "mpich_shm_*"), ("/tmp", "hydra_hwloc_xmlfile_*"))
"""Locations of the files that MPICH writes and its ranks remove once all have joined."""

LAUNCHERS = ("mpiexec", "mpirun", "hydra_pmi_proxy")


class RankProcess(NamedTuple):
    """Process of a rank."""

    process: int
    stopped: bool


class LaunchedProcesses(NamedTuple):
    """Processes below the launcher at one moment."""

    ranks: Mapping[int, RankProcess]
    witness: bool
    helpers: frozenset[int] = frozenset()
    """The launcher's processes that are not ranks."""


class Startup:
    """Supervision of the ranks below one launcher, until their witness is ready.

    Ends the ranks `limit` seconds after one was stopped.
    """

    def __init__(self, launcher: int, size: int, limit: float) -> None:
        self._launcher, self._size, self._limit = launcher, size, limit
        self._watched: dict[int, int] = {}  # rank by descriptor of its process
        self._processes: dict[int, int] = {}
        self._stopped: dict[int, float] = {}  # since when, by rank
        self._reported: set[int] = set()
        self._helpers: dict[int, int] = {}  # descriptor by process of the launcher
        self._dead: tuple[list[int], float] | None = None  # the ranks to report, and when
        children = PROC / f"{os.getpid()}/task/{os.getpid()}/children"
        self.active = size > 1 and hasattr(os, "pidfd_open") and children.exists()  # one rank has no witness
        if self.active:
            self._ended, self._begun = os.pidfd_open(launcher), started_at(launcher)
            self._poller = select.epoll()  # returns descriptors in the order in which they became ready
            self._poller.register(self._ended, select.EPOLLIN)

    def poll(self) -> None:
        """Wait for an event or an interval, and check all processes; end all ranks if the launcher does not."""
        interval = POLL_SECONDS if len(self._processes) == self._size else FIRST_POLL_SECONDS
        ready = [descriptor for descriptor, _ in self._poller.poll(interval)]
        now = time.monotonic()
        for descriptor in ready:
            if descriptor in self._watched:
                self._dead = self._dead or ([self._watched[descriptor]], now)
                self._poller.unregister(descriptor)
        if self._ended in ready:
            return
        seen = find_processes(self._launcher)
        if seen.witness:
            self.close()
            return
        self._watch_processes(seen, now)
        late = self._dead is not None and now - self._dead[1] > GRACE_SECONDS
        if late or any(now - since > self._limit for since in self._stopped.values()):
            for rank in seen.ranks.values():
                with suppress(ProcessLookupError):
                    os.kill(rank.process, signal.SIGKILL)
            if self._dead is None:
                self._dead = sorted(self._stopped), time.monotonic()

    def _watch_processes(self, seen: LaunchedProcesses, now: float) -> None:
        for process in seen.helpers - self._helpers.keys():
            with suppress(ProcessLookupError):
                self._helpers[process] = os.pidfd_open(process)
        for rank, (process, stopped) in seen.ranks.items():
            if rank not in self._processes:
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(process)
                    self._watched[descriptor], self._processes[rank] = rank, process
                    self._poller.register(descriptor, select.EPOLLIN)
            if not stopped:
                self._stopped.pop(rank, None)
            since = self._stopped.setdefault(rank, now) if stopped else now
            if now - since > min(STOPPED_REPORT_SECONDS, self._limit / 2) and rank not in self._reported:
                self._reported.add(rank)
                _report(
                    f"{self._name([rank])} is stopped during the start of the ranks; they wait for it, and end "
                    f"after {self._limit:g} s: continue it with  kill -CONT {process}"
                )

    def _name(self, ranks: Sequence[int]) -> str:
        return witness.describe(ranks, self._size, self._processes)

    def finish(self, stop_requested: bool, code: int, listener: witness.Listener, survives: bool = False) -> int:
        """Report which rank died first once the launcher has ended with `code`, unless `stop_requested`; clean up.

        `listener` receives the witness's report. Returns the exit code: hydra may give 0 where a rank ended by
        os._exit(0). With `survives`, the others went on after a death, and the code is the launcher's.
        """
        if not self.active:
            report = listener.report(GRACE_SECONDS) if self._size > 1 else ""
            if report:
                print(report, file=sys.stderr, flush=True)
            return code or int(bool(report) and not survives)
        until = time.monotonic() + GRACE_SECONDS
        for descriptor in (*self._watched, *self._helpers.values()):  # they may end after the launcher
            select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        self.close()
        if code not in (0, 2):  # 2: the ranks have reported bad input
            if stop_requested:
                _report("stopped by a signal during the start of the ranks")
            elif self._dead is not None:
                _report(f"{self._name(self._dead[0])} ended during the start of the ranks")
            remove_leftover_files(self._begun)
        return code

    def close(self) -> None:
        self.active = False
        self._poller.close()
        for descriptor in (self._ended, *self._watched, *self._helpers.values()):
            os.close(descriptor)
        self._watched.clear()
        self._helpers.clear()


def find_processes(launcher: int) -> LaunchedProcesses:
    """Return the ranks among the processes that a launcher has started, and whether their witness is ready."""
    ranks: dict[int, RankProcess] = {}
    helpers: set[int] = set()
    waiting = [(launcher, False)]
    while waiting:
        parent, in_rank = waiting.pop()
        for process in map(int, read_process(parent, f"task/{parent}/children").split()):
            command = read_process(process, "cmdline").split(b"\0")
            if witness.__file__.encode() in command:
                return LaunchedProcesses(ranks, True, frozenset(helpers))
            rank = None if in_rank else rank_of(read_process(process, "environ"))
            if rank is not None:
                ranks[rank] = RankProcess(process, stat_of(process)[0] in STOPPED)
            elif not in_rank:
                helpers.add(process)
            waiting.append((process, in_rank or rank is not None))
    return LaunchedProcesses(ranks, False, frozenset(helpers))


def rank_of(environment: bytes) -> int | None:
    """Return the rank that a launcher has given to a process with this environment (as in /proc); None for no rank."""
    for line in environment.split(b"\0"):
        name, _, value = line.partition(b"=")
        if name.decode(errors="replace") in RANK_VARIABLES:
            return int(value)
    return None


def read_process(process: int, name: str) -> bytes:
    """Return the content of a process's file in /proc; empty where the process has ended."""
    with suppress(OSError):
        return (PROC / str(process) / name).read_bytes()
    return b""


def name_of(process: int) -> str:
    """Return the name of a process's program; empty where it has ended."""
    return read_process(process, "comm").strip().decode(errors="replace")


def stat_of(process: int) -> list[str]:
    """Return the fields of a process's `stat` in /proc from its state on; an empty state where it has ended."""
    return read_process(process, "stat").rpartition(b")")[2].decode().split() or [""]


def remove_leftover_files(begun: float) -> None:
    """Remove MPICH's files of a launch that has ended: this user's, younger than `begun`, and no longer in use.

    A file may belong to a launcher that was started after `begun` and before the file; such a file stays.
    """
    own_processes = []
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                own_processes.append(int(path.name))
    launches = [started_at(process) for process in own_processes if name_of(process) in LAUNCHERS]
    for folder, pattern in MPICH_FILES:
        for path in Path(folder).glob(pattern):
            with suppress(OSError):
                status = path.stat()
                theirs = any(begun <= started <= status.st_mtime for started in launches)
                if status.st_uid != os.getuid() or status.st_mtime < begun or theirs:
                    continue
                if not any(os.fsencode(path) in read_process(process, "maps") for process in own_processes):
                    path.unlink()


def started_at(process: int) -> float:
    """Return when a process began, in seconds since 1970; 0.0 where it has ended, even if it is not reaped yet."""
    fields = stat_of(process)
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields[0] not in ("", "Z") else 0.0


def _report(report: str) -> None:
    print(f"unisono: {report}", file=sys.stderr, flush=True)
