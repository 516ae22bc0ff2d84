"""Player of one rank's program: begins rounds, waits for some to end, continues. The transport carries transfers out.

pieces      0     1     2     3  ...         at most `in_flight` pieces at once; each goes through
lanes      a b   a b   a b   a b             every lane by itself
rounds     ■□□   ■■□   ■□□
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Program, Round
from unisono.transports.transport import Move

TICKET_SPREAD = 1 << 9
"""Smallest distance at which ticket numbers may be reused: a ticket waits for the end of the one that far before."""


class OpenRounds(Protocol):
    """Interface to the rounds of a play (`rounds.py`)."""

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin a round. `ticket` numbers piece and lane, equally on all ranks; its rounds begin one by one."""

    def wait_some(self) -> Sequence[int]:
        """Wait until rounds have ended, with received data in place; return their tickets."""


def play(program: Program, cut: Cut, rounds: OpenRounds, in_flight: int, spread: int = TICKET_SPREAD) -> None:
    """Carry out the program on the payload of `rounds`, with at most `in_flight` pieces at once.

    No ticket begins before the one `spread` before it has ended.
    """
    lanes = len(program.lanes)
    position: dict[int, int] = {}

    def advance(ticket: int) -> bool:
        """Begin the ticket's next round with any moves; return False if there is none."""
        piece, lane = divmod(ticket, lanes)
        lane_rounds = program.lanes[lane]
        for number in range(position[ticket], len(lane_rounds)):
            if moves := _moves(lane_rounds[number], cut, piece):
                position[ticket] = number + 1
                rounds.begin(ticket, moves)
                return True
        del position[ticket]
        return False

    ticket, tickets = 0, cut.pieces * lanes
    while position or ticket < tickets:
        while (
            ticket < tickets and len(position) < in_flight * lanes and ticket - min(position, default=ticket) < spread
        ):
            position[ticket] = 0
            advance(ticket)
            ticket += 1
        if position:
            for ended in rounds.wait_some():
                advance(ended)


def _moves(transfers: Round, cut: Cut, piece: int) -> list[Move]:
    """Return the transfers with any elements: both ends omit the same empty ones."""
    moves = [Move(action, peer, cut.region(piece, chunk, span)) for action, peer, chunk, span in transfers]
    return [move for move in moves if move.region.stop > move.region.start]
