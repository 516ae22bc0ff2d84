"""Windows whose memory is there: the ranks of a node agree on the room (`room.py`), then each takes its own part.

Pages are taken by MADV_POPULATE_WRITE (Linux 5.14), which says no where a first touch would be SIGBUS: two worlds, or
two jobs, that ask at the same moment cannot be promised the same memory. An older kernel takes them by writing zeros,
right after the room was found.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import sys
from functools import cache
from pathlib import Path

import numpy as np

from unisono.mpi import MPI, least
from unisono.transports.room import LARGEST_SLOT, LEAST_SLOT, SLOTS, SLOTS_SHARE, plan_slot, shortage
from unisono.transports.window import Window

SHARED = Path("/dev/shm")
"""Where MPI libraries keep windows on Linux."""

MADV_POPULATE_WRITE = 23


def reserve_slots(comm: MPI.Intracomm, beside: int) -> tuple[Window | None, int]:
    """A window for SLOTS slots of each rank of a node, and the bytes of a slot; None where messages have to do.

    `beside` is what each rank needs besides. Called by all ranks of `comm` together, who share a node.
    """
    free = _agreed_free(comm)
    slot = plan_slot(free, comm.size, beside)
    window = _take(comm, SLOTS * slot) if slot else None
    while window is None and slot > LEAST_SLOT:  # somebody else took the room
        slot //= 2
        window = _take(comm, SLOTS * slot)
    if window is None:
        _tell(comm, free, SLOTS * LEAST_SLOT + beside, "they send each other messages instead, which is slower")
    elif slot < LARGEST_SLOT:
        _tell(comm, free, SLOTS * LARGEST_SLOT * SLOTS_SHARE + beside, "they pass data in smaller pieces")
    return window, slot if window is not None else 0


def _agreed_free(comm: MPI.Intracomm) -> int | None:
    """Bytes that are free in the node's shared memory by the least that any rank sees; None where none can say."""
    free = -1
    if SHARED.is_dir():
        found = os.statvfs(SHARED)
        free = found.f_bavail * found.f_frsize
    agreed = least(comm, free)
    return None if agreed < 0 else agreed


def _take(comm: MPI.Intracomm, nbytes: int) -> Window | None:
    """A window whose pages every rank has taken; None on all ranks where one could not."""
    window = Window(comm, nbytes)
    if least(comm, populate(np.frombuffer(window.own, np.uint8))):
        return window
    window.free()
    return None


def populate(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Have the system take all pages of this memory now; False where it has no room for them."""
    start = memory.ctypes.data & -mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    advised = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_WRITE)
    if advised == 0:
        return True
    if ctypes.get_errno() in (errno.EFAULT, errno.ENOMEM):
        return False
    memory[:] = 0  # the kernel does not know that advice
    return True


def _tell(comm: MPI.Intracomm, free: int | None, nbytes: int, instead: str) -> None:
    """Say once in a process what there is no room for; the first rank of the node speaks."""
    told = _told()
    if instead not in told and comm.rank == 0:
        words = shortage(socket.gethostname(), str(SHARED), free, nbytes * comm.size, instead)
        print(words, file=sys.stderr, flush=True)
    told.add(instead)


@cache
def _told() -> set[str]:
    """What this process has been told already."""
    return set()
