"""Shared memory as a transport: SEND signals that memory is ready (posted), ADD and RECEIVE read the peer's memory in
place and signal that (taken). There are no intermediate copies.

    rank 0   posts chunk 2 ──▶ posted[0 → 1] = 7
    rank 1   sums it from rank 0's memory ──▶ taken[1 ← 0] = 7      rank 0's SEND has completed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, perform
from unisono.transports.signals import MAX_LANES, Signals
from unisono.transports.transport import Completion, Move


class WindowTransport:
    """Transport for any schedule on payloads in shared memory, one piece at a time. `views` holds the payload of each
    rank, as mapped here."""

    copies = False

    def __init__(self, signals: Signals, views: Sequence[Any], lanes: int, arithmetic: Arithmetic) -> None:
        assert lanes <= MAX_LANES, f"{lanes} lanes on a window, {MAX_LANES} at most"
        self._signals, self._views, self._lanes = signals, views, lanes
        self._arithmetic = arithmetic
        self._own = views[signals.rank]
        self._sends: list[tuple[int, Move, int]] = []
        """SENDs that were not received yet, and the number of receives by the peer that completes them."""
        self._receives: list[tuple[int, Move]] = []
        self._borrowed: dict[tuple[int, int], int] = {}  # the peer whose memory a move reads
        self._borrowing: set[tuple[int, int]] = set()  # lanes and peers

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Signal the memory of SENDs as ready."""
        lane = ticket % self._lanes
        for move in moves:
            if move.action is Action.SEND:
                self._sends.append((ticket, move, self._signals.post(lane, move.peer)))
            else:
                self._receives.append((ticket, move))

    def completed(self) -> list[Completion]:
        """Check the signals of the peers once, the first expected move per peer and lane; return completed moves."""
        done: list[Completion] = []
        waiting: set[tuple[int, int]] = set()
        receives, self._receives = self._receives, []
        for ticket, move in receives:
            channel = ticket % self._lanes, move.peer
            if (
                channel in waiting
                or channel in self._borrowing
                or self._signals.posted(*channel) <= self._signals.took(*channel)
            ):
                waiting.add(channel)
                self._receives.append((ticket, move))
            else:
                done.append(self._take(ticket, move))
        sends, self._sends = self._sends, []
        for ticket, move, count in sends:
            if self._signals.taken(ticket % self._lanes, move.peer) >= count:
                done.append(Completion(ticket, move.position))
            else:
                self._sends.append((ticket, move, count))
        return done

    def release(self, ticket: int, position: int) -> None:
        """Signal to the peer that its memory was read."""
        channel = ticket % self._lanes, self._borrowed.pop((ticket, position))
        self._borrowing.remove(channel)
        self._signals.take(*channel)

    def _take(self, ticket: int, move: Move) -> Completion:
        self._signals.fence()
        theirs = self._views[move.peer][move.region]
        if move.action is Action.ADD:
            self._borrowed[ticket, move.position] = move.peer
            self._borrowing.add((ticket % self._lanes, move.peer))
            return Completion(ticket, move.position, theirs, borrowed=True)
        perform([self._arithmetic.copy(self._own[move.region], theirs)])
        self._signals.take(ticket % self._lanes, move.peer)
        return Completion(ticket, move.position)
