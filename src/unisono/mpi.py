"""The one module that loads MPI: importing it starts MPI (MPI_Init), with threads allowed everywhere."""

import numpy as np

from unisono.errors import LaunchError
from unisono.launch import INSTALL_HINT

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no library
    raise LaunchError(f"no MPI library can be loaded ({str(error).splitlines()[0]}); {INSTALL_HINT}") from error

__all__ = ["MPI", "allreduce_min"]


def allreduce_min(comm: MPI.Intracomm, value: int) -> int:
    """Return the least of the values of all ranks of `comm`, which call this together.

    `comm.allreduce(value, MPI.MIN)` would do the same, but mpi4py 4 duplicates the communicator for it while it holds
    Python's lock: two threads of two processes that do so on two communicators deadlock.
    """
    found = np.array([value], np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
    return int(found[0])
