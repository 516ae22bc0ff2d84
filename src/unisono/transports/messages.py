"""MPI messages as a channel: nonblocking sends and receives, waits that give the core to another rank between looks."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from unisono.mpi import MPI
from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import Move
from unisono.transports.rounds import OpenRound, sum_arrivals

TAGS = 1 << 15
"""Tags repeat after this many tickets: MPI promises 32,768, and far fewer are in flight at once."""


class MessageChannel:
    """Carries moves as messages of bytes on a communicator of its own; `payload` is a flat array."""

    def __init__(self, comm: MPI.Intracomm, payload: Array, arithmetic: Arithmetic) -> None:
        self._comm, self._payload, self._arithmetic = comm, payload, arithmetic
        self._rounds: dict[int, OpenRound] = {}
        self._open: dict[int, int] = {}  # ticket -> requests that have not completed
        self._requests: list[MPI.Request] = []
        self._owners: list[int] = []
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # landing places of ended rounds, by length

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round. Receives first, so that what comes early lands where it belongs."""
        arrivals = [self._receive(move, ticket) for move in moves]
        for move in moves:
            if move.action is Action.SEND:
                self._post(self._comm.Isend([self._payload[move.where], MPI.BYTE], move.peer, ticket % TAGS), ticket)
        self._rounds[ticket] = OpenRound(moves, arrivals)
        self._open[ticket] = len(moves)

    def ended(self) -> list[int]:
        """Wait until rounds have ended, with all that they brought in place; their tickets."""
        done: list[int] = []
        while not done:
            completed = MPI.Request.Testsome(self._requests)
            if not completed:
                os.sched_yield()
                continue
            for place in sorted(completed, reverse=True):
                self._requests.pop(place)
                ticket = self._owners.pop(place)
                self._open[ticket] -= 1
                if not self._open[ticket]:
                    self._end(ticket)
                    done.append(ticket)
        return done

    def _receive(self, move: Move, ticket: int) -> Array | None:
        """Where what a RECEIVE or an ADD brings will land; None for a SEND."""
        if move.action is Action.SEND:
            return None
        target = self._payload[move.where]
        if move.action is Action.ADD:
            spare = self._spare[target.size]
            target = spare.pop() if spare else np.empty_like(target)
        self._post(self._comm.Irecv([target, MPI.BYTE], move.peer, ticket % TAGS), ticket)
        return target

    def _post(self, request: MPI.Request, ticket: int) -> None:
        self._requests.append(request)
        self._owners.append(ticket)

    def _end(self, ticket: int) -> None:
        moves, arrivals = self._rounds.pop(ticket)
        del self._open[ticket]
        sum_arrivals(self._comm.rank, self._payload, self._arithmetic, moves, arrivals)
        for move, landing in zip(moves, arrivals, strict=True):
            if move.action is Action.ADD and landing is not None:
                self._spare[landing.size].append(landing)
