"""Messages between a worker and a server over MPI, without any other rank; arrivals and deaths of workers.

Open MPI started with `mpirun --with-ft ulfm` (ULFM: Bland et al. 2013) reports a dead process (error class 75 or 76,
MPIX_ERR_PROC_FAILED) and lets the others go on. Other libraries end all ranks: `survives_deaths` tells which, at the
start of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from unisono.asynchronous.messages import HEADER_LENGTH, WorkerHeader, decode_header
from unisono.errors import StallError
from unisono.launch import TIMEOUT
from unisono.mpi import MPI
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.startup import STOPPED, stat_of
from unisono.step.program import RankGroup
from unisono.transports.messages import wait_until
from unisono.world import World

ANNOUNCING, TO_SERVER, TO_WORKER = 1, 2, 3
"""Tags: headers, and messages in each direction. A server may be a thread of the rank of its worker."""

PIECE_BYTES = 1 << 28
"""Largest message in bytes: MPI counts in 32 bits."""

LOOK_SECONDS = 1.0
"""Seconds between two looks whether the other end of an awaited message is stopped."""

MAX_SLEEP_SECONDS = 5e-4
"""Longest sleep between two looks at a message that is awaited."""


class MpiLink:
    """Link to the rank `peer` of a communicator. Raises StallError after `timeout` seconds without its message."""

    def __init__(
        self, comm: MPI.Intracomm, peer: int, worker: bool, timeout: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Make one end of the link; `worker`: True on the worker's end. `stopped` returns True where the other end is
        known to be stopped."""
        self._comm, self.peer, self._timeout, self._stopped = comm, peer, timeout, stopped
        self._sends, self._receives = (TO_SERVER, TO_WORKER) if worker else (TO_WORKER, TO_SERVER)
        self._role = "server" if worker else "worker"
        self.waits = True
        """False once the other end has stopped within an exchange: messages begin, and are not waited for."""
        self._abandoned: list[MPI.Request] = []
        """Messages of exchanges that have failed: they may still be under way, and keep the memory they use."""

    def announce(self, header: torch.Tensor) -> None:
        """Send a header, by which a server chooses whom it serves."""
        self._wait([self._comm.Isend(header.numpy(), self.peer, ANNOUNCING)])

    def swap(self, sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        """Send one tensor and receive another, at the same time. Tensors are contiguous; None is not sent."""
        receives = [self._comm.Irecv(piece, self.peer, self._receives) for piece in _pieces(received)]
        sends = [self._comm.Isend(piece, self.peer, self._sends) for piece in _pieces(sent)]
        self._wait([*receives, *sends])

    def send(self, tensor: torch.Tensor) -> None:
        self.swap(tensor, None)

    def receive(self, tensor: torch.Tensor) -> None:
        self.swap(None, tensor)

    def _wait(self, requests: list[MPI.Request]) -> None:
        if not self.waits:
            self._abandoned += requests
            return
        began = looked = polled = time.monotonic()

        def check() -> None:
            nonlocal began, looked, polled
            now = time.monotonic()
            if now - polled > LOOK_SECONDS:  # this process was stopped itself: what it missed is no wait
                began, looked = began + now - polled, now
            polled = now
            due = now - looked > LOOK_SECONDS
            looked = now if due else looked
            if now - began > self._timeout or (due and self._stopped()):
                raise StallError(
                    f"rank {self._comm.rank} has waited {now - began:.0f} s for an exchange with the {self._role} of "
                    f"rank {self.peer}: it has ended or is stopped; if it is only slow, raise UNISONO_TIMEOUT"
                )

        # one by one: Testall names no error class, which tells of a dead rank
        try:
            wait_until(lambda: all(request.Test() for request in requests), check, MAX_SLEEP_SECONDS)
        except BaseException:  # the library may still use the buffers, whatever has ended the wait
            self._abandoned += requests
            raise


def _pieces(tensor: torch.Tensor | None) -> list[list[object]]:
    """Return the messages of a tensor; none for None."""
    if tensor is None:
        return []
    content = tensor.view(-1).view(torch.uint8).numpy()
    starts = range(0, max(1, len(content)), PIECE_BYTES)
    return [[content[start : start + PIECE_BYTES], MPI.BYTE] for start in starts]


FAILED_CLASSES = (75, 76, 77)
"""Open MPI's error classes for a death: MPIX_ERR_PROC_FAILED, with a message from anyone pending, MPIX_ERR_REVOKED."""

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


def _failed_ranks(comm: MPI.Intracomm) -> frozenset[int]:
    """Return the ranks of a communicator that the library knows to have died."""
    failed = comm.Get_failed()
    ranks = frozenset(failed.Translate_ranks(None, comm.group)) if failed.size else frozenset[int]()
    failed.Free()
    return ranks


class MpiPort:
    """Arrivals at the server of this rank. Workers are the first ranks of the communicator."""

    def __init__(self, comm: MPI.Intracomm, workers: int, timeout: float, processes: Mapping[int, int]) -> None:
        """Make the port; `processes` are those of the workers on this host, by worker."""
        self._comm, self._processes = comm, processes
        limit, stopped = min(timeout, SILENCE_SECONDS), self.stopped
        self._links = [MpiLink(comm, worker, False, limit, partial(stopped, worker)) for worker in range(workers)]
        self.dead: frozenset[int] = frozenset()
        """Workers that are known to have died."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)

    def poll(self) -> tuple[int, WorkerHeader] | None:
        """Return a worker that has announced itself, and its header; None where there is none."""
        status, header = MPI.Status(), torch.empty(HEADER_LENGTH, dtype=torch.float64)
        try:
            message = self._comm.Improbe(MPI.ANY_SOURCE, ANNOUNCING, status)
            if message is None:
                return None
            message.Recv(header.numpy())
        except MPI.Exception as error:
            if not self.lost(error):
                raise
            return None
        return status.Get_source(), decode_header(header)

    def link(self, worker: int) -> MpiLink:
        return self._links[worker]

    def stopped(self, worker: int) -> bool:
        """Return True for a worker of this host whose process is stopped (SIGSTOP)."""
        return worker in self._processes and stat_of(self._processes[worker])[0] in STOPPED

    def lost(self, error: Exception) -> bool:
        """Return True for an error of a message whose other end has died."""
        if not process_failed(error):
            return False
        # ask the library who has died, and accept it: later messages from anyone are received again
        self.dead |= _failed_ranks(self._comm) & frozenset(range(len(self._links)))
        self._comm.Ack_failed(self._comm.size)
        return True


class ServerLinks:
    """Links of a worker to all servers, on a communicator of their own. All ranks make them together, servers too."""

    def __init__(self, rule: BaseAsynchronousRule, world: World, comm: MPI.Intracomm) -> None:
        self.comm = comm
        """Communicator of workers and servers."""
        self.seats = rule.seats(world.size)
        self.timeout = TIMEOUT if world.watch is None else world.watch.timeout
        first = self.seats.workers if rule.server == "rank" else 0
        self.links = [
            MpiLink(comm, first + server, worker=True, timeout=self.timeout) for server in range(self.seats.servers)
        ]
        """Links by the numbers of the servers."""

    def first_living(self) -> int:
        """Return the first worker that is not known to have died; needs an MPI library that tells."""
        dead = _failed_ranks(self.comm)
        return next(worker for worker in range(self.seats.workers) if worker not in dead)

    def __call__(self, pair: RankGroup) -> MpiLink:
        """Return the link to the server of a pair."""
        return self.links[pair.number]
