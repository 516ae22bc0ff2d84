"""Threads of one process as a transport: any number of ranks in a test, without MPI."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unisono.errors import ScheduleError
from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, copy_of, perform
from unisono.transports.player import Completion, Move, Rounds, play

STUCK_SECONDS = 30.0
"""Seconds without a message after which a play counts as stuck."""


Queues = dict[tuple[int, int, int], queue.SimpleQueue[Any]]
"""Messages between threads: (from, to, ticket) -> messages, oldest first."""


class ThreadTransport:
    """Transport through queues that all ranks share; `payload` is a flat view."""

    copies = False

    def __init__(self, queues: Queues, rank: int, payload: Any, arithmetic: Arithmetic) -> None:
        self._queues, self._rank, self._payload, self._arithmetic = queues, rank, payload, arithmetic
        self._sent: list[Completion] = []
        self._receives: list[tuple[int, Move]] = []

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Put copies of the sent data into the queues."""
        for move in moves:
            if move.action is Action.SEND:
                data = copy_of(self._arithmetic, self._payload[move.region])
                self._find(self._rank, move.peer, ticket).put(data)
                self._sent.append(Completion(ticket, move.position))
            else:
                self._receives.append((ticket, move))

    def completed(self) -> list[Completion]:
        """Receive available messages, in the order of the moves of each peer and ticket; return the completed moves."""
        done, self._sent = self._sent, []
        still: list[tuple[int, Move]] = []
        empty: set[tuple[int, int]] = set()
        for ticket, move in self._receives:
            queue_ = self._find(move.peer, self._rank, ticket)
            if (move.peer, ticket) in empty or queue_.empty():
                empty.add((move.peer, ticket))
                still.append((ticket, move))
                continue
            data = queue_.get_nowait()
            if move.action is Action.RECEIVE:
                perform([self._arithmetic.copy(self._payload[move.region], data)])
                done.append(Completion(ticket, move.position))
            else:
                done.append(Completion(ticket, move.position, data))
        self._receives = still
        return done

    def _find(self, sender: int, receiver: int, ticket: int) -> queue.SimpleQueue[Any]:
        """Return the queue between two ranks; whichever thread asks first makes it.

        `setdefault` is one step for all threads. A `defaultdict` is not: sender and receiver could each make a queue.
        """
        key = (sender, receiver, ticket)
        return self._queues.get(key) or self._queues.setdefault(key, queue.SimpleQueue())

    def release(self, ticket: int, position: int) -> None:
        """Do nothing: received data is a copy."""


def play_all(
    programs: Sequence[Program],
    cut: Callable[[int], Cut],
    payloads: Sequence[Any],
    arithmetic: Arithmetic,
    in_flight: int = 4,
) -> None:
    """Play every rank's program on its payload, one thread per rank. `cut` returns the cut for a number of chunks."""
    queues: Queues = {}

    def run_rank(rank: int) -> None:
        transport = ThreadTransport(queues, rank, payloads[rank], arithmetic)
        rounds = Rounds(rank, payloads[rank], arithmetic, [transport] * len(programs), _wait_function(rank))
        play(programs[rank], cut(programs[rank].chunks), rounds, in_flight)

    run_ranks(len(programs), run_rank, ScheduleError)


def run_ranks(ranks: int, run: Callable[[int], None], consequence: type[Exception]) -> None:
    """Call `run` with each rank, in a thread for each. Raises the error of one; a `consequence` of another's error only
    where there is no other."""
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, consequence)):
        raise error


def _wait_function(rank: int) -> Callable[[Callable[[], list[int]]], list[int]]:
    """Return a wait that yields the core between polls, and raises ScheduleError after STUCK_SECONDS."""

    def wait(poll: Callable[[], list[int]]) -> list[int]:
        give_up = time.monotonic() + STUCK_SECONDS
        while not (ended := poll()):
            if time.monotonic() > give_up:
                raise ScheduleError(f"rank {rank} waits forever")
            os.sched_yield()
        return ended

    return wait
