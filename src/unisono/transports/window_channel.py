"""Memory that lies in a window as a channel: SEND means "my memory is ready" (posted), ADD and RECEIVE read the peer's
memory where it lies and say so (taken). No byte is copied on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, perform
from unisono.transports.player import Move
from unisono.transports.rounds import reduce_arrivals
from unisono.transports.windows import LANES, Call, Signals


class _Round:
    """What a lane still waits for."""

    def __init__(self, moves: Sequence[Move], awaited: list[tuple[int, int]]) -> None:
        self.moves, self.awaited = moves, awaited
        self.missing = [place for place, move in enumerate(moves) if move.action is not Action.SEND]
        self.kept: list[Any] = [None] * len(moves)


class WindowChannel:
    """Carries the moves of any schedule on memory that lies in a window. One piece at a time; `views` holds, for each
    rank, its payload as seen from here."""

    def __init__(self, signals: Signals, views: Sequence[Any], lanes: int, arithmetic: Arithmetic, what: Call) -> None:
        assert lanes <= LANES, f"{lanes} lanes on a window, {LANES} at most"
        self._signals, self._views, self._lanes = signals, views, lanes
        self._arithmetic, self._what = arithmetic, what
        self._own = views[signals.rank]
        self._rounds: dict[int, _Round] = {}

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Say what is ready."""
        lane = ticket % self._lanes
        awaited = [(move.peer, self._signals.post(lane, move.peer)) for move in moves if move.action is Action.SEND]
        self._rounds[ticket] = _Round(moves, awaited)

    def ended(self) -> list[int]:
        """Wait until rounds have ended, with all that they brought in place; their tickets."""
        done: list[int] = []

        def look() -> bool:
            done.extend(ticket for ticket in self._rounds if self._proceed(ticket))
            return bool(done)

        self._signals.until(look, self._what)
        for ticket in done:
            del self._rounds[ticket]
        return done

    def _proceed(self, ticket: int) -> bool:
        """Read what is ready; when all was read here and by the peers, end the round."""
        this, lane, signals = self._rounds[ticket], ticket % self._lanes, self._signals
        for place in list(this.missing):
            move = this.moves[place]
            first = next(earlier for earlier in this.missing if this.moves[earlier].peer == move.peer)
            if first == place and signals.posted(lane, move.peer) > signals.took(lane, move.peer):
                signals.fence()
                # kept aside, since a chunk that is sent in the same round must stay as it is until it was read
                landed = self._own[move.where].copy() if move.action is Action.ADD else self._own[move.where]
                perform([self._arithmetic.copy(landed, self._views[move.peer][move.where])])
                this.kept[place] = landed
                signals.take(lane, move.peer)
                this.missing.remove(place)
        if this.missing or any(signals.taken(lane, peer) < count for peer, count in this.awaited):
            return False
        reduce_arrivals(signals.rank, self._own, self._arithmetic, this.moves, this.kept)
        return True
