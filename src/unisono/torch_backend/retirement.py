"""Release of a group's resources, once all its ranks have ended the group.

MPI frees communicators and shared memory collectively, but a program may end a group on one rank only, or on one rank
much later than on another. So no rank waits long: a thread for this group alone waits for all ranks, then frees.

    rank 0   destroy ── waits 1 s ── continues        thread: ... all have ended it ── none has left ── free
    rank 1   trains ............. destroy ── continues     thread: all have ended it ── none has left ── free
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from unisono.mpi import MPI

JOIN_TIMEOUT_SECONDS = 1.0
"""Seconds that a rank waits for the others; usually all ranks end a group together."""

MAX_POLL_INTERVAL_SECONDS = 0.05
"""Largest number of seconds between two polls."""


class Retirement:
    """Groups that have been ended on this rank."""

    def __init__(self) -> None:
        self._leaving, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)

    def retire(self, comm: MPI.Intracomm, free: Callable[[], None]) -> None:
        """Call `free`, a collective, once all ranks of `comm` have called this; wait for that for a while."""
        thread = threading.Thread(target=self._run, args=(comm, free), name="unisono retirement", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()
        thread.join(JOIN_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Stop at the end of the program: resources that are not freed yet stay."""
        for over in (self._leaving, self._over):
            over.set()
            end = time.monotonic() + JOIN_TIMEOUT_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self, comm: MPI.Intracomm, free: Callable[[], None]) -> None:
        """Free once all ranks have ended the group, and then have said that none of them has left meanwhile.

        A rank that frees alone would still wait for the others in MPI when its program ends, and crash.
        """
        if _all_reach(comm, self._leaving) and _all_reach(comm, self._over):
            free()


def _all_reach(comm: MPI.Intracomm, over: threading.Event) -> bool:
    """Return True once all ranks have called this, False if `over` is set before."""
    everyone, interval = comm.Ibarrier(), 1e-4
    while not everyone.Test():
        if over.wait(interval):
            return False
        interval = min(2 * interval, MAX_POLL_INTERVAL_SECONDS)
    return True
