"""The one module that loads MPI: importing it starts MPI (MPI_Init), with threads allowed everywhere."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from unisono.errors import LaunchError
from unisono.launch import INSTALL_HINT

M_PERTURB, ZEROS = -6, 0xFF
"""glibc's `mallopt`: with this byte, new memory is filled with its complement, zeros."""


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Fill all memory that `malloc` returns meanwhile with zeros, in a step of Slurm.

    MPICH 5 sends its address in a buffer of 4 KiB that it has not cleared, with zeros abbreviated. If other data was
    there before, a line of it is longer than the 1,024 bytes that Slurm's PMI reads, and MPI_Init fails.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if "SLURM_STEP_ID" in os.environ else None
    if mallopt is not None:
        mallopt(M_PERTURB, ZEROS)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(M_PERTURB, 0)


GET_DUMPABLE = 3
"""Request of Linux's `prctl`: 0 if other processes may not access the memory of this one."""


def copies_memory() -> bool:
    """Return False if the kernel refuses to copy memory to this process from others, or from this one to others.

    It refuses the call itself where a container's seccomp profile does; then a copy within this process fails, too.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "process_vm_readv") or libc.prctl(GET_DUMPABLE, 0, 0, 0, 0) == 0:
        return False
    memory = ctypes.create_string_buffer(8)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 8)
    calls = libc.process_vm_readv, libc.process_vm_writev
    return all(call(os.getpid(), part, 1, part, 1, 0) == 8 for call in calls)


if not copies_memory():
    os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")  # MPICH 5 would try to copy others' memory, and end the run

try:
    with zeroed_memory():
        from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no library
    raise LaunchError(f"no MPI library can be loaded ({str(error).splitlines()[0]}); {INSTALL_HINT}") from error

__all__ = ["MPI", "allreduce_min", "start"]


def start() -> None:
    """Start MPI where importing this module did not: in a process that was forked after the import."""
    if not MPI.Is_initialized():
        with zeroed_memory():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)


def allreduce_min(comm: MPI.Intracomm, value: int) -> int:
    """Return the least of the values of all ranks of `comm`, which call this together.

    `comm.allreduce(value, MPI.MIN)` would do the same, but mpi4py 4 duplicates the communicator for it while it holds
    Python's lock: two threads of two processes that do so on two communicators deadlock.
    """
    least = np.array([value], np.int64)
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    return int(least[0])
