"""Threads of one process as a transport: any number of ranks in a test, without MPI."""

from __future__ import annotations

import os
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import ScheduleError
from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, copy_of, perform
from unisono.transports.player import play
from unisono.transports.rounds import Rounds
from unisono.transports.transport import Done, Move

STUCK_SECONDS = 30.0
"""Seconds without a message after which a play counts as stuck."""


@dataclass
class Boxes:
    """Messages between threads: (from, to, ticket) -> messages, oldest first."""

    boxes: defaultdict[tuple[int, int, int], queue.SimpleQueue[Any]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )


class ThreadTransport:
    """Transport through boxes that all ranks share; `payload` is a flat view."""

    copies = False

    def __init__(self, boxes: Boxes, rank: int, payload: Any, arithmetic: Arithmetic) -> None:
        self._boxes, self._rank, self._payload, self._arithmetic = boxes.boxes, rank, payload, arithmetic
        self._sent: list[Done] = []
        self._awaited: list[tuple[int, Move]] = []

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Put copies of the sent data into the boxes."""
        for move in moves:
            if move.action is Action.SEND:
                self._boxes[self._rank, move.peer, ticket].put(copy_of(self._arithmetic, self._payload[move.where]))
                self._sent.append(Done(ticket, move.place))
            else:
                self._awaited.append((ticket, move))

    def completed(self) -> list[Done]:
        """Receive available messages, in the order of the moves of each peer and ticket; return the completed moves."""
        done, self._sent = self._sent, []
        still: list[tuple[int, Move]] = []
        empty: set[tuple[int, int]] = set()
        for ticket, move in self._awaited:
            box = self._boxes[move.peer, self._rank, ticket]
            if (move.peer, ticket) in empty or box.empty():
                empty.add((move.peer, ticket))
                still.append((ticket, move))
                continue
            arrived = box.get_nowait()
            if move.action is Action.RECEIVE:
                perform([self._arithmetic.copy(self._payload[move.where], arrived)])
                done.append(Done(ticket, move.place))
            else:
                done.append(Done(ticket, move.place, arrived))
        self._awaited = still
        return done

    def release(self, ticket: int, place: int) -> None:
        """Do nothing: received data is a copy."""


def play_all(
    programs: Sequence[Program],
    cut: Callable[[int], Cut],
    payloads: Sequence[Any],
    arithmetic: Arithmetic,
    in_flight: int = 4,
) -> None:
    """Play every rank's program on its payload, one thread per rank. `cut` returns the cut for a number of chunks."""
    boxes = Boxes()

    def one(rank: int) -> None:
        transport = ThreadTransport(boxes, rank, payloads[rank], arithmetic)
        rounds = Rounds(rank, payloads[rank], arithmetic, [transport] * len(programs), _waits_of(rank))
        play(programs[rank], cut(programs[rank].chunks), rounds, in_flight)

    with ThreadPoolExecutor(len(programs)) as pool:
        for future in [pool.submit(one, rank) for rank in range(len(programs))]:
            future.result()


def _waits_of(rank: int) -> Callable[[Callable[[], list[int]]], list[int]]:
    """Return a wait that yields the core between polls, and raises ScheduleError after STUCK_SECONDS."""

    def wait(look: Callable[[], list[int]]) -> list[int]:
        give_up = time.monotonic() + STUCK_SECONDS
        while not (ended := look()):
            if time.monotonic() > give_up:
                raise ScheduleError(f"rank {rank} waits forever")
            os.sched_yield()
        return ended

    return wait
