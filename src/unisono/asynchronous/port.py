"""Arrivals of workers over MPI, and their deaths where the MPI library tells of them.

Open MPI started with `mpirun --with-ft ulfm` (ULFM: Bland et al. 2013) reports a dead process (error class 75 or 76,
MPIX_ERR_PROC_FAILED) and lets the others go on. Other libraries end all ranks: `survives_deaths` tells which, at the
start of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from unisono.asynchronous.link import MpiLink, poll_any
from unisono.asynchronous.messages import HEADER_LENGTH, WorkerHeader, decode_header
from unisono.mpi import MPI

FAILED_CLASSES = (75, 76)
"""Open MPI's error classes for a dead process: MPIX_ERR_PROC_FAILED, and with a message from anyone pending."""

SILENCE_SECONDS = 30.0
"""Longest time that a server waits for one message of a worker that has come; after it the worker counts as stopped."""


def survives_deaths(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True where the other ranks go on after one has died: under Open MPI's `mpirun --with-ft ulfm`."""
    return MPI.get_vendor()[0] == "Open MPI" and environment.get("OMPI_MCA_mpi_ft_enable") == "1"


def process_failed(error: BaseException | None) -> bool:
    """Return True for an MPI error that means that the other end of a message has died, or was caused by one."""
    while error is not None:
        if isinstance(error, MPI.Exception) and error.Get_error_class() in FAILED_CLASSES:
            return True
        error = error.__cause__
    return False


class MpiPort:
    """Arrivals at the server of this rank. Workers are the first ranks of the communicator."""

    def __init__(self, comm: MPI.Intracomm, workers: int, timeout: float, processes: Mapping[int, int]) -> None:
        """Make the port; `processes` are those of the workers on this host, by worker."""
        self._processes = processes
        self._comm = comm
        self._links = [
            MpiLink(comm, worker, False, min(timeout, SILENCE_SECONDS), partial(self.stopped, worker))
            for worker in range(workers)
        ]
        self._dead: frozenset[int] = frozenset()
        comm.Set_errhandler(MPI.ERRORS_RETURN)

    def poll(self) -> tuple[int, WorkerHeader] | None:
        """Return a worker that has announced itself, and its header; None where there is none."""
        try:
            found = poll_any(self._comm, HEADER_LENGTH)
        except MPI.Exception as error:
            if not process_failed(error):
                raise
            self._look()
            return None
        return None if found is None else (found[0], decode_header(found[1]))

    def link(self, worker: int) -> MpiLink:
        """Return the link to a worker."""
        return self._links[worker]

    def dead(self) -> frozenset[int]:
        """Return the workers that are known to have died."""
        return self._dead

    def stopped(self, worker: int) -> bool:
        """Return True for a worker of this host whose process is stopped (SIGSTOP)."""
        if worker not in self._processes:
            return False
        try:
            status = Path(f"/proc/{self._processes[worker]}/stat").read_bytes()
        except OSError:
            return False
        return status.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def lost(self, error: Exception) -> bool:
        """Return True for an error of a message whose other end has died."""
        if process_failed(error):
            self._look()
            return True
        return False

    def _look(self) -> None:
        """Ask the library who has died, and accept it: later messages from anyone are received again."""
        failed = self._comm.Get_failed()
        ranks = failed.Translate_ranks(None, self._comm.group) if failed.size else []
        self._dead = self._dead | frozenset(rank for rank in ranks if 0 <= rank < len(self._links))
        self._comm.Ack_failed(self._comm.size)
        failed.Free()
