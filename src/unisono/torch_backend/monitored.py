"""Barrier that names the missing ranks: rank 0 waits for a message from each other rank, then answers them all.

rank 1 ── arrived ──▶ rank 0             rank 0 waits for all of them, or raises and names the missing ones
rank 2 ── arrived ──▶ rank 0
rank 1, 2 ◀── released ── rank 0         the others raise if no message arrives
"""

from __future__ import annotations

import time

import numpy as np

from unisono.errors import BackendError
from unisono.mpi import MPI
from unisono.torch_backend.messages import Messages
from unisono.transports.messages import wait_until

ARRIVED, RELEASED = 0, 1


def monitored_barrier(messages: Messages, rank: int, size: int, seconds: float, wait_all_ranks: bool) -> None:
    """Wait until all ranks have reached the barrier, `seconds` at most; 2 (p-1) messages.

    Raises BackendError otherwise. Rank 0's names the first missing rank, or with `wait_all_ranks` all of them.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        if seconds <= 0:
            messages.undelivered = True
            raise BackendError("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
        missing = _missing(messages, size, end, wait_all_ranks)
        if missing:
            messages.undelivered = True  # late ranks will still send their message
            raise BackendError(_timeout_message(missing, seconds))
        for other in range(1, size):
            _send(messages, other, RELEASED)
    else:
        _send(messages, 0, ARRIVED)
        if not _received(messages, 0, RELEASED, end):
            messages.undelivered = True
            raise BackendError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: no message within {seconds * 1e3:g} ms. Please check rank 0 logs for faulty rank."
            )


def _missing(messages: Messages, size: int, end: float, wait_all_ranks: bool) -> list[int]:
    """Return the missing ranks; only the first, unless `wait_all_ranks`."""
    missing = []
    for other in range(1, size):
        if not _received(messages, other, ARRIVED, end):
            missing.append(other)
            if not wait_all_ranks:
                break
    return missing


def _timeout_message(missing: list[int], seconds: float) -> str:
    if len(missing) == 1:
        return f"[Rank 0]: Rank {missing[0]} failed to pass monitoredBarrier in {seconds * 1e3:g} ms"
    ranks = ", ".join(map(str, missing))
    return f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {seconds * 1e3:g} ms"


def _send(messages: Messages, other: int, what: int) -> None:
    word = np.zeros(1, np.uint8)
    messages.abandon(messages.comm.Isend(word, other, messages.reserved_tag(what)), word)  # without a wait


def _received(messages: Messages, other: int, what: int, end: float) -> bool:
    """Return True if the message of another rank arrives in time."""
    word = np.zeros(1, np.uint8)
    request = messages.comm.Irecv(word, other, messages.reserved_tag(what))
    wait_until(lambda: request.Test() or time.monotonic() > end, lambda: None)
    if request == MPI.REQUEST_NULL or request.Test():
        return True
    request.Cancel()
    request.Wait()
    return False
