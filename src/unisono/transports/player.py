"""Plays one rank's program: begins rounds, waits for some to end, goes on. What a transfer means is the transport's.

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
"""No ticket begins before the one so many before it has ended: so transports may use their numbers again."""


class OpenRounds(Protocol):
    """What carries out the rounds of a play (`rounds.py`)."""

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin a round. `ticket` names the piece and the lane, the same on all ranks; its rounds come one by one."""

    def ended(self) -> Sequence[int]:
        """Wait until rounds have ended, with all that they brought in place; their tickets."""


def play(program: Program, cut: Cut, rounds: OpenRounds, in_flight: int, spread: int = TICKET_SPREAD) -> None:
    """Carry the program out on the payload that `rounds` was made for, at most `in_flight` pieces at once.

    No ticket begins before the one `spread` before it has ended.
    """
    lanes = len(program.lanes)
    position: dict[int, int] = {}

    def advance(ticket: int) -> bool:
        """Begin the ticket's next round that moves anything; False when there is none."""
        piece, lane = divmod(ticket, lanes)
        turns = program.lanes[lane]
        for number in range(position[ticket], len(turns)):
            if moves := _moves(turns[number], cut, piece):
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
            for ended in rounds.ended():
                advance(ended)


def _moves(transfers: Round, cut: Cut, piece: int) -> list[Move]:
    """The transfers that move anything: both ends leave out the same empty ones."""
    moves = [Move(action, peer, cut.region(piece, chunk, span)) for action, peer, chunk, span in transfers]
    return [move for move in moves if move.where.stop > move.where.start]
