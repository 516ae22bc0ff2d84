"""Windows with allocated memory: the ranks of a node agree on the size (`slot_size.py`), then each allocates its part.

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

from unisono.mpi import MPI, allreduce_min
from unisono.transports.slot_size import (
    MAX_SLOT_BYTES,
    MIN_SLOT_BYTES,
    SLOTS_DIVISOR,
    SLOTS_PER_RANK,
    plan_slot,
    shortage_message,
)
from unisono.transports.window import Window

SHM_FOLDER = Path("/dev/shm")
"""Folder in which MPI libraries keep windows on Linux."""

MADV_POPULATE_WRITE = 23


def reserve_slots(comm: MPI.Intracomm, other_bytes: int) -> tuple[Window | None, int]:
    """Return a window for the slots of each rank of a node, and the bytes of a slot; (None, 0) without enough memory.

    Each rank needs `other_bytes` bytes besides. All ranks of `comm`, on one node, call it together.
    """
    free = _agreed_free(comm)
    slot = plan_slot(free, comm.size, other_bytes)
    window = _allocate(comm, SLOTS_PER_RANK * slot) if slot else None
    while window is None and slot > MIN_SLOT_BYTES:  # another process took the memory
        slot //= 2
        window = _allocate(comm, SLOTS_PER_RANK * slot)
    if window is None:
        _warn(
            comm,
            free,
            SLOTS_PER_RANK * MIN_SLOT_BYTES + other_bytes,
            "they send each other messages instead, which is slower",
        )
    elif slot < MAX_SLOT_BYTES:
        _warn(
            comm,
            free,
            SLOTS_PER_RANK * MAX_SLOT_BYTES * SLOTS_DIVISOR + other_bytes,
            "they pass data in smaller pieces",
        )
    return window, slot if window is not None else 0


def _agreed_free(comm: MPI.Intracomm) -> int | None:
    """Return the free bytes of the node's shared memory, the least that any rank finds; None if one finds none."""
    free = -1
    if SHM_FOLDER.is_dir():
        found = os.statvfs(SHM_FOLDER)
        free = found.f_bavail * found.f_frsize
    agreed = allreduce_min(comm, free)
    return None if agreed < 0 else agreed


def _allocate(comm: MPI.Intracomm, nbytes: int) -> Window | None:
    """Return a window with allocated pages on every rank; None on all ranks if one could not allocate."""
    window = Window(comm, nbytes)
    if allreduce_min(comm, populate(np.frombuffer(window.own, np.uint8))):
        return window
    window.free()
    return None


def populate(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """Allocate all pages of this memory now; return False if the system has not enough memory."""
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


def _warn(comm: MPI.Intracomm, free: int | None, nbytes: int, consequence: str) -> None:
    """Print a shortage of shared memory, once per process, on the first rank of the node."""
    warned = _warned()
    if consequence not in warned and comm.rank == 0:
        words = shortage_message(socket.gethostname(), str(SHM_FOLDER), free, nbytes * comm.size, consequence)
        print(words, file=sys.stderr, flush=True)
    warned.add(consequence)


@cache
def _warned() -> set[str]:
    """Return the shortages that this process has reported already."""
    return set()
