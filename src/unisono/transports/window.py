"""MPI shared windows: memory of each rank of a node, which all of them can access, and its size.

/dev/shm promises memory that it may not have: a window of any size is made without an error, and the rank that first
touches a page without memory is killed by SIGBUS. Docker's /dev/shm has 64 MB, of which 8 ranks of MPICH take 43 MB at
start, and a world, each process group and the memory of gradients have windows:

    free   ├── slots of this world ──┤──────────── gradients, other worlds, loaders ────────────┤
           0     1/SLOTS_DIVISOR = 1/4                                                             1

The ranks of a node agree on the size of slots, then each allocates its part. Pages are allocated by MADV_POPULATE_WRITE
(Linux 5.14), which fails where a first touch would raise SIGBUS: two worlds, or two jobs, that allocate at the same
moment cannot get the same memory. On an older kernel pages are allocated by writing zeros, right after the size was
agreed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from unisono.mpi import MPI, allreduce_min

MAX_SLOT_BYTES = 2 << 20
"""Largest slot in bytes: barriers then take negligible time; 0.25 to 4 MB were within a third of each other."""

MIN_SLOT_BYTES = 64 << 10
"""Smallest slot in bytes: with smaller ones messages are as fast."""

SLOTS_PER_RANK = 3
"""Number of slots of a rank."""

SLOTS_DIVISOR = 4
"""Divisor of the free memory: the slots of a world take at most this part, because more worlds may follow."""

MARGIN_DIVISOR = 8
"""Divisor of the free memory for the part that is left to others."""

SHM_FOLDER = Path("/dev/shm")
"""Folder in which MPI libraries keep windows on Linux."""

MADV_POPULATE_WRITE = 23

_WARNED: set[str] = set()
"""Consequences of shortages that were printed."""


class Window:
    """Window of `nbytes` bytes on each rank of `comm`, on one node; all of them make and free it together."""

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each part near the rank that owns it
        self._window = MPI.Win.Allocate_shared(max(nbytes, 8), 1, info, comm)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)  # no rank locks anything else, so no communication is needed
        comm.Barrier()  # waits on memory make no MPI progress: leave when no rank needs it
        self.nbytes = nbytes
        self.buffers: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
        self.own = self.buffers[comm.rank]
        self.sync = self._window.Sync

    def free(self) -> None:
        """Free the memory, unless that is done. Views of it must not be used afterwards."""
        if self._window != MPI.WIN_NULL:
            self._window.Unlock_all()
            self._window.Free()


def plan_slot(free: int | None, ranks: int, other_bytes: int = 0) -> int:
    """Return the bytes of a slot for `ranks` ranks of a node with `free` bytes of shared memory; 0: use messages.

    `other_bytes` is the number of bytes that each rank needs besides its slots; `free` is None if unknown. A slot is a
    power of two, as large as its share of the free memory allows; the smallest one may take more than its share.

    >>> plan_slot(24_000_000, 8), plan_slot(3_000_000, 8), plan_slot(1_000_000, 8)
    (131072, 65536, 0)
    """
    if free is None:
        return MAX_SLOT_BYTES

    def bytes_needed(slot: int) -> int:
        return ranks * (SLOTS_PER_RANK * slot + other_bytes)

    slot = MAX_SLOT_BYTES
    while slot > MIN_SLOT_BYTES and bytes_needed(slot) > free // SLOTS_DIVISOR:
        slot //= 2
    return slot if bytes_needed(slot) <= free - free // MARGIN_DIVISOR else 0


def shortage_message(host: str, folder: str, free: int | None, bytes_needed: int, consequence: str) -> str:
    """Return the line that reports a shortage: free and needed memory, the consequence, and the remedy."""
    available = "too little memory" if free is None else f"{free / 1e6:.1f} MB free"
    return (
        f"unisono: {folder} of {host} has {available}, and the ranks would take {bytes_needed / 1e6:.1f} MB: "
        f"{consequence}. Remedy: a larger {folder}: docker run --shm-size=1g, or mount -o remount,size=1g {folder}"
    )


def reserve_slots(comm: MPI.Intracomm, other_bytes: int) -> tuple[Window | None, int]:
    """Return a window with the slots of each rank of a node, and `other_bytes` bytes behind them, and the bytes of a
    slot; (None, 0) without enough memory. All ranks of `comm`, on one node, call it together.
    """
    free = _agreed_free(comm)
    slot = plan_slot(free, comm.size, -(-other_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    window = allocate_window(comm, SLOTS_PER_RANK * slot + other_bytes) if slot else None
    while window is None and slot > MIN_SLOT_BYTES:  # another process took the memory
        slot //= 2
        window = allocate_window(comm, SLOTS_PER_RANK * slot + other_bytes)
    if window is None:
        least = SLOTS_PER_RANK * MIN_SLOT_BYTES + other_bytes
        _warn(comm, free, least, "they send each other messages instead, which is slower")
    elif slot < MAX_SLOT_BYTES:
        best = SLOTS_PER_RANK * MAX_SLOT_BYTES * SLOTS_DIVISOR + other_bytes
        _warn(comm, free, best, "they pass data in smaller pieces")
    return window, slot if window is not None else 0


def _agreed_free(comm: MPI.Intracomm) -> int | None:
    """Return the free bytes of the node's shared memory, the least that any rank finds; None if one finds none."""
    free = -1
    if SHM_FOLDER.is_dir():
        status = os.statvfs(SHM_FOLDER)
        free = status.f_bavail * status.f_frsize
    agreed = allreduce_min(comm, free)
    return None if agreed < 0 else agreed


def allocate_window(comm: MPI.Intracomm, nbytes: int) -> Window | None:
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
    if consequence not in _WARNED and comm.rank == 0:
        message = shortage_message(socket.gethostname(), str(SHM_FOLDER), free, nbytes * comm.size, consequence)
        print(message, file=sys.stderr, flush=True)
    _WARNED.add(consequence)
