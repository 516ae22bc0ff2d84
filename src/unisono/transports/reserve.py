"""Windows with allocated memory: the ranks of a node agree on the size (`room.py`), then each allocates its part.

Pages are allocated by MADV_POPULATE_WRITE (Linux 5.14), which fails where a first touch would raise SIGBUS: two worlds,
or two jobs, that allocate at the same moment cannot get the same memory. On an older kernel pages are allocated by
writing zeros, right after the size was agreed.
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
"""Folder in which MPI libraries keep windows on Linux."""

MADV_POPULATE_WRITE = 23


def reserve_slots(comm: MPI.Intracomm, beside: int) -> tuple[Window | None, int]:
    """Return a window for SLOTS slots of each rank of a node, and the bytes of a slot; (None, 0) without enough memory.

    `beside` is the number of bytes that each rank needs besides. All ranks of `comm`, on one node, call it together.
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
    """Return the free bytes of the node's shared memory, the least that any rank finds; None if one finds none."""
    free = -1
    if SHARED.is_dir():
        found = os.statvfs(SHARED)
        free = found.f_bavail * found.f_frsize
    agreed = least(comm, free)
    return None if agreed < 0 else agreed


def _take(comm: MPI.Intracomm, nbytes: int) -> Window | None:
    """Return a window with allocated pages on every rank; None on all ranks if one could not allocate."""
    window = Window(comm, nbytes)
    if least(comm, populate(np.frombuffer(window.own, np.uint8))):
        return window
    window.free()
    return None


def populate(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Allocate all pages of this memory now; return False if the system has no room for them."""
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
    """Print a shortage of shared memory, once per process, on the first rank of the node."""
    told = _told()
    if instead not in told and comm.rank == 0:
        words = shortage(socket.gethostname(), str(SHARED), free, nbytes * comm.size, instead)
        print(words, file=sys.stderr, flush=True)
    told.add(instead)


@cache
def _told() -> set[str]:
    """Return the shortages that this process has reported already."""
    return set()
