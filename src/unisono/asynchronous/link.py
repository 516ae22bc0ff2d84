"""Messages between a worker and a server over MPI, without any other rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from unisono.errors import StallError
from unisono.mpi import MPI
from unisono.transports.messages import wait_until

ANNOUNCING, TO_SERVER, TO_WORKER = 1, 2, 3
"""Tags: headers, and messages in each direction. A server may be a thread of the rank of its worker."""

PIECE_BYTES = 1 << 28
"""Largest message in bytes: MPI counts in 32 bits."""

LOOK_SECONDS = 1.0
"""Seconds between two looks whether the other end of an awaited message is stopped."""

MAX_SLEEP_SECONDS = 5e-4
"""Longest sleep between two looks at a message that is awaited."""


class PeerLink(Protocol):
    """Messages between the two ends of an exchange. Tensors are contiguous."""

    def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
        """Send one tensor and receive another, at the same time."""

    def send(self, mine: torch.Tensor) -> None:
        """Send a tensor."""

    def receive(self, came: torch.Tensor) -> None:
        """Receive a tensor."""


class MpiLink:
    """Link to the rank `peer` of a communicator. Raises StallError after `timeout` seconds without its message."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        peer: int,
        worker: bool,
        timeout: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make one end of the link; `worker`: True on the worker's end. `stopped` returns True where the other end is
        known to be stopped."""
        self._stopped = stopped
        self._comm, self.peer, self._timeout = comm, peer, timeout
        self._sends, self._receives = (TO_SERVER, TO_WORKER) if worker else (TO_WORKER, TO_SERVER)
        self._role = "server" if worker else "worker"
        self._abandoned: list[MPI.Request] = []
        """Messages of exchanges that have failed: they may still be under way, and keep the memory they use."""

    def announce(self, header: torch.Tensor) -> None:
        """Send a header, by which a server chooses whom it serves."""
        self._wait([self._comm.Isend(header.numpy(), self.peer, ANNOUNCING)])

    def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
        """Send one tensor and receive another, at the same time."""
        self._wait([*self._begin_receive(came), *self._begin_send(mine)])

    def send(self, mine: torch.Tensor) -> None:
        """Send a tensor."""
        self._wait(self._begin_send(mine))

    def receive(self, came: torch.Tensor) -> None:
        """Receive a tensor."""
        self._wait(self._begin_receive(came))

    def _begin_send(self, tensor: torch.Tensor) -> list[MPI.Request]:
        return [self._comm.Isend(piece, self.peer, self._sends) for piece in _pieces(tensor)]

    def _begin_receive(self, tensor: torch.Tensor) -> list[MPI.Request]:
        return [self._comm.Irecv(piece, self.peer, self._receives) for piece in _pieces(tensor)]

    def _wait(self, requests: list[MPI.Request]) -> None:
        began = looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            now = time.monotonic()
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


def _pieces(tensor: torch.Tensor) -> list[list[object]]:
    content = tensor.view(-1).view(torch.uint8).numpy()
    starts = range(0, max(1, len(content)), PIECE_BYTES)
    return [[content[start : start + PIECE_BYTES], MPI.BYTE] for start in starts]


def poll_any(comm: MPI.Intracomm, length: int) -> tuple[int, torch.Tensor] | None:
    """Return the rank and the header, of `length` numbers, of a worker that has announced itself; None without one."""
    status = MPI.Status()
    message = comm.Improbe(MPI.ANY_SOURCE, ANNOUNCING, status)
    if message is None:
        return None
    header = torch.empty(length, dtype=torch.float64)
    message.Recv(header.numpy())
    return status.Get_source(), header
