"""Threads of one process as a channel: any number of ranks in a test, without MPI."""

from __future__ import annotations

import os
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from unisono.errors import ScheduleError
from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import Move, play
from unisono.transports.rounds import OpenRound, reduce_arrivals

PATIENCE = 30.0
"""Seconds without a message after which a play counts as stuck."""


@dataclass
class Board:
    """Where threads leave messages for each other: (from, to, ticket) -> messages, oldest first."""

    boxes: defaultdict[tuple[int, int, int], queue.SimpleQueue[Array]] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )


class ThreadChannel:
    """Carries moves over a board that all ranks share; `payload` is a flat array."""

    def __init__(self, board: Board, rank: int, payload: Array, arithmetic: Arithmetic) -> None:
        self._board, self._rank, self._payload, self._arithmetic = board, rank, payload, arithmetic
        self._rounds: dict[int, OpenRound] = {}

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Leave the messages of a round on the board."""
        for move in moves:
            if move.action is Action.SEND:
                self._board.boxes[self._rank, move.peer, ticket].put(self._payload[move.where].copy())
        self._rounds[ticket] = OpenRound(moves, [None] * len(moves))

    def ended(self) -> list[int]:
        """Wait until rounds have ended, with all that they brought in place; their tickets."""
        give_up = time.monotonic() + PATIENCE
        while True:
            done = [ticket for ticket in self._rounds if self._collect(ticket)]
            if done:
                for ticket in done:
                    self._end(ticket)
                return done
            if time.monotonic() > give_up:
                raise ScheduleError(f"rank {self._rank} waits forever in {self._rounds}")
            os.sched_yield()

    def _collect(self, ticket: int) -> bool:
        """Take what has arrived for a round; whether nothing is missing."""
        moves, arrivals = self._rounds[ticket]
        for place, move in enumerate(moves):
            if move.action is not Action.SEND and arrivals[place] is None:
                try:
                    arrivals[place] = self._board.boxes[move.peer, self._rank, ticket].get_nowait()
                except queue.Empty:
                    return False
        return True

    def _end(self, ticket: int) -> None:
        moves, arrivals = self._rounds.pop(ticket)
        reduce_arrivals(self._rank, self._payload, self._arithmetic, moves, arrivals)
        for move, arrived in zip(moves, arrivals, strict=True):
            if move.action is Action.RECEIVE and arrived is not None:
                self._payload[move.where] = arrived


def play_all(
    programs: Sequence[Program],
    cut: Callable[[int], Cut],
    payloads: Sequence[Array],
    arithmetic: Arithmetic,
    in_flight: int = 4,
) -> None:
    """Play every rank's program on its payload, a thread each. `cut` makes the cut for a number of chunks."""
    board = Board()

    def one(rank: int) -> None:
        channel = ThreadChannel(board, rank, payloads[rank], arithmetic)
        play(programs[rank], cut(programs[rank].chunks), channel, in_flight)

    with ThreadPoolExecutor(len(programs)) as pool:
        for future in [pool.submit(one, rank) for rank in range(len(programs))]:
            future.result()
