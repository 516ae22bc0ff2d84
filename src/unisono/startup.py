"""Supervision of ranks that are being started: reports which one dies, or is stopped, before their witness is ready.

    unisono train ── starts ──▶ mpiexec ──▶ proxy ──▶ ranks 0, 1, 2 ──▶ witness
          └── looks at their processes ────────────────────┘    until it is there

A rank imports Python packages for seconds before it can report an error itself. Until the witness (`witness.py`) is
ready, the command that started the launcher finds the ranks below it in /proc, by the variable that numbers them. A
launcher ends all ranks when one dies; where it does not, and where a rank stays stopped, they are ended here. The
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

INTERVAL, FIRST_INTERVAL = 0.1, 0.01
"""Seconds between two polls; the second until all ranks have been seen."""

GRACE = 3.0
"""Seconds that a launcher has to end all ranks after one has died."""

STOPPED = 10.0
"""Seconds after which a stopped rank is reported."""

PROC = Path("/proc")

LEFT_BY_MPICH = (("/dev/shm", "mpich_shm_*"), ("/tmp", "hydra_hwloc_xmlfile_*"))
"""Places of the files that MPICH writes and its ranks remove once all have joined."""

LAUNCHERS = ("mpiexec", "mpirun", "hydra_pmi_proxy")


class Rank(NamedTuple):
    """Process that is a rank."""

    process: int
    stopped: bool


class Seen(NamedTuple):
    """Processes below the launcher at one moment."""

    ranks: Mapping[int, Rank]
    witness: bool
    between: frozenset[int] = frozenset()
    """Processes of the launcher that are no ranks."""


class Startup:
    """Supervision of the ranks below one launcher, until their witness is ready.

    Ends the ranks `limit` seconds after one was stopped.
    """

    def __init__(self, launcher: int, size: int, limit: float) -> None:
        self._launcher, self._size, self._limit = launcher, size, limit
        self._watched: dict[int, int] = {}  # descriptor of a process: its rank
        self._processes: dict[int, int] = {}
        self._stopped: dict[int, float] = {}  # since when
        self._told: set[int] = set()
        self._between: dict[int, int] = {}  # a process of the launcher: its descriptor
        self._dead: tuple[list[int], float] | None = None  # several that were found at one look, and when
        self.goes_on = hasattr(os, "pidfd_open") and (PROC / f"{os.getpid()}/task/{os.getpid()}/children").exists()
        if self.goes_on:
            self._ended, self._begun = os.pidfd_open(launcher), _started(launcher)

    def look(self) -> None:
        """Poll once, after an event or an interval; end all ranks where nobody else does."""
        poll = select.poll()
        for descriptor in (self._ended, *(self._watched if self._dead is None else ())):
            poll.register(descriptor, select.POLLIN)
        interval = INTERVAL if len(self._processes) == self._size else FIRST_INTERVAL
        ready = {descriptor for descriptor, _ in poll.poll(interval * 1000)}
        now = time.monotonic()
        died = sorted(self._watched[descriptor] for descriptor in ready & self._watched.keys())
        if died and self._dead is None:
            self._dead = died, now
        if self._ended in ready:
            return
        seen = look_below(self._launcher)
        if seen.witness:
            self.close()
            return
        self._follow(seen, now)
        late = self._dead is not None and now - self._dead[1] > GRACE
        if late or any(now - since > self._limit for since in self._stopped.values()):
            self._end_all(seen)

    def _follow(self, seen: Seen, now: float) -> None:
        """Watch new processes, and report those that stay stopped."""
        for process in seen.between - self._between.keys():
            with suppress(ProcessLookupError):
                self._between[process] = os.pidfd_open(process)
        for rank, (process, stopped) in seen.ranks.items():
            if rank not in self._processes:
                with suppress(ProcessLookupError):
                    self._watched[os.pidfd_open(process)] = rank
                    self._processes[rank] = process
            if not stopped:
                self._stopped.pop(rank, None)
            since = self._stopped.setdefault(rank, now) if stopped else now
            if now - since > min(STOPPED, self._limit / 2) and rank not in self._told:
                self._told.add(rank)
                _say(
                    f"{self._name([rank])} is stopped while the ranks are being started; they wait for it, and end "
                    f"after {self._limit:g} s: continue it with  kill -CONT {process}"
                )

    def _end_all(self, seen: Seen) -> None:
        for rank in seen.ranks.values():
            with suppress(ProcessLookupError):
                os.kill(rank.process, signal.SIGKILL)
        if self._dead is None:
            self._dead = sorted(self._stopped), time.monotonic()

    def _name(self, ranks: Sequence[int]) -> str:
        return witness.describe(ranks, self._size, self._processes)

    def finish(self, asked: bool, code: int, listener: witness.Listener) -> int:
        """Report which rank died first once the launcher has ended with `code`, unless that was `asked` for; clean up.

        `listener` receives the witness's report. Returns the exit code: hydra may give 0 where a rank ended by
        os._exit(0).
        """
        if not self.goes_on:
            words = listener.words(GRACE)
            if words:
                print(words, file=sys.stderr, flush=True)
            return code or int(bool(words))
        self._await_the_last()
        self.close()
        if code not in (0, 2):  # 2: the ranks have said what is wrong with the input
            if self._dead is not None and not asked:
                _say(f"{self._name(self._dead[0])} ended while the ranks were being started")
            remove_left(self._begun)
        return code

    def _await_the_last(self) -> None:
        """Wait GRACE seconds at most for the processes of the launcher, which may end before them."""
        until = time.monotonic() + GRACE
        for descriptor in (*self._watched, *self._between.values()):
            select.select([descriptor], [], [], max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stop the supervision."""
        self.goes_on = False
        for descriptor in (self._ended, *self._watched, *self._between.values()):
            os.close(descriptor)
        self._watched.clear()
        self._between.clear()


def look_below(launcher: int) -> Seen:
    """Return the ranks, and whether their witness is there, among the processes that a launcher has started."""
    ranks: dict[int, Rank] = {}
    between: set[int] = set()
    waiting = [(launcher, False)]
    while waiting:
        parent, in_rank = waiting.pop()
        for process in _children(parent):
            command = _read(process, "cmdline").split(b"\0")
            if witness.__file__.encode() in command:
                return Seen(ranks, True, frozenset(between))
            number = None if in_rank else rank_of(_read(process, "environ"))
            if number is not None:
                state = _read(process, "stat").rpartition(b")")[2].split()
                ranks[number] = Rank(process, bool(state) and state[0] in b"Tt")
            elif not in_rank:
                between.add(process)
            waiting.append((process, in_rank or number is not None))
    return Seen(ranks, False, frozenset(between))


def rank_of(environment: bytes) -> int | None:
    """Return the rank that a launcher has given to a process with this environment (as in /proc); None for no rank."""
    for line in environment.split(b"\0"):
        name, _, value = line.partition(b"=")
        if name.decode(errors="replace") in RANK_VARIABLES:
            return int(value)
    return None


def _children(process: int) -> Sequence[int]:
    return [int(child) for child in _read(process, f"task/{process}/children").split()]


def _read(process: int, name: str) -> bytes:
    """Return the content of a process's file in /proc; empty where the process has ended."""
    with suppress(OSError):
        return (PROC / str(process) / name).read_bytes()
    return b""


def remove_left(begun: float) -> None:
    """Remove MPICH's files of a launch that has ended: this user's, younger than `begun`, and no longer in use.

    A file may belong to a launcher that was started after `begun` and before the file; such a file stays.
    """
    mine = [int(path.name) for path in PROC.glob("[0-9]*") if _owner(path) == os.getuid()]
    others = [
        _started(process) for process in mine if _read(process, "comm").strip().decode(errors="replace") in LAUNCHERS
    ]
    for folder, pattern in LEFT_BY_MPICH:
        for path in Path(folder).glob(pattern):
            with suppress(OSError):
                about = path.stat()
                theirs = any(begun <= started <= about.st_mtime for started in others)
                if about.st_uid == os.getuid() and about.st_mtime >= begun and not theirs and not _held(path, mine):
                    path.unlink()


def _owner(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_uid
    return None


def _started(process: int) -> float:
    """Return when a process began, in seconds since 1970; 0.0 where it has ended, even if it is not reaped yet."""
    numbers = _read(process, "stat").rpartition(b")")[2].split()
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    runs = bool(numbers) and numbers[0] != b"Z"
    return booted + int(numbers[19]) / os.sysconf("SC_CLK_TCK") if runs else 0.0


def _held(path: Path, processes: Sequence[int]) -> bool:
    """Return True if a process has mapped the file."""
    return any(os.fsencode(path) in _read(process, "maps") for process in processes)


def _say(words: str) -> None:
    print(f"unisono: {words}", file=sys.stderr, flush=True)
