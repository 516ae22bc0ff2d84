"""Player of one rank's program: begins rounds, waits for some to end, continues. Transports carry transfers out.

    pieces      0     1     2     3  ...         at most `in_flight` pieces at once; each goes through
    lanes      a b   a b   a b   a b             every lane by itself
    rounds     ■□□   ■■□   ■□□

A transport carries the transfers between this rank and some of its peers: shared memory for those of the same node,
messages for those of other nodes. A round ends once all its data has arrived, and was summed in the order of ranks:

    round of rank 1     ADD 0 ◀── memory of the node ──┐
                        ADD 3 ◀── message ─────────────┴─▶ 0 + own + 3, then the round's SENDs are waited for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Action, Program, Round
from unisono.transports.arithmetic import Arithmetic, copy_of, perform

TICKET_SPREAD = 1 << 9
"""Smallest distance at which ticket numbers may be reused: a ticket waits for the end of the one that far before."""


class Move(NamedTuple):
    """Transfer of one piece, with its chunks as a slice of the payload."""

    action: Action
    peer: int
    region: slice
    position: int = 0
    """Index in the round."""


class Completion(NamedTuple):
    """Completed move."""

    ticket: int
    position: int
    data: Any = None
    """Received data of an ADD, to be summed and then released. The data of a RECEIVE is in place."""
    borrowed: bool = False
    """True if the received data is in the peer's memory: the peer waits until it is released."""


class Transport(Protocol):
    """Interface that carries the moves of one play. A ticket numbers a piece and a lane, equally on all ranks."""

    copies: bool
    """True if a SEND is copied out of the payload as it begins: sums then need not wait until it is received."""

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin the moves of a round, in the order of the schedule, without a wait. Rounds of a ticket are in order."""

    def completed(self) -> list[Completion]:
        """Poll once, and return the moves completed since. A SEND has completed when it was received."""

    def release(self, ticket: int, position: int) -> None:
        """Release the memory of the data received for a move, which was summed or copied: it may be reused."""


def play(program: Program, cut: Cut, rounds: Rounds, in_flight: int, spread: int = TICKET_SPREAD) -> None:
    """Carry out the program on the payload of `rounds`, with at most `in_flight` pieces at once.

    No ticket begins before the one `spread` before it has ended.
    """
    lanes = len(program.lanes)
    position: dict[int, int] = {}

    def advance(ticket: int) -> None:
        """Begin the ticket's next round with any moves; without one the ticket has ended."""
        piece, lane = divmod(ticket, lanes)
        lane_rounds = program.lanes[lane]
        for index in range(position[ticket], len(lane_rounds)):
            if moves := _moves(lane_rounds[index], cut, piece):
                position[ticket] = index + 1
                rounds.begin(ticket, moves)
                return
        del position[ticket]

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


class OpenRound:
    """Round that has begun: its pending moves, and the data received so far."""

    def __init__(self, moves: Sequence[Move], copied: Sequence[bool]) -> None:
        self.moves = moves
        self.arrivals: list[Any] = [None] * len(moves)
        self.copied = copied
        """For each move, True if it is a SEND whose data was copied out of the payload already."""
        self.unread_sends = sum(copied)
        self.pending = len(moves) - self.unread_sends
        """Number of moves that must complete before received data is summed."""
        self.summed = False
        self.released: set[int] = set()
        """Indices of the moves whose memory is no longer in use."""


class Rounds:
    """Open rounds of one rank's play; `by_peer` holds the transport for each peer.

    `payload` is a flat view of `arithmetic`. `wait` calls a function until its result, the tickets of ended rounds, is
    not empty, and returns it; it may raise to end the wait.
    """

    def __init__(
        self,
        rank: int,
        payload: Any,
        arithmetic: Arithmetic,
        by_peer: Sequence[Transport],
        wait: Callable[[Callable[[], list[int]]], list[int]],
    ) -> None:
        self._rank, self._payload, self._arithmetic, self._wait = rank, payload, arithmetic, wait
        self._by_peer = by_peer
        self._transports: list[Transport] = list({id(transport): transport for transport in by_peer}.values())
        self._open: dict[int, OpenRound] = {}

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin a round with its transports. `ticket` numbers piece and lane; its rounds begin one by one."""
        moves = [move._replace(position=position) for position, move in enumerate(moves)]
        by_peer = self._by_peer
        copied = [move.action is Action.SEND and by_peer[move.peer].copies for move in moves]
        self._open[ticket] = OpenRound(moves, copied)
        if len(self._transports) == 1:
            self._transports[0].begin(ticket, moves)
            return
        for transport in self._transports:
            if part := [move for move in moves if by_peer[move.peer] is transport]:
                transport.begin(ticket, part)

    def wait_some(self) -> list[int]:
        """Wait until rounds have ended, with received data in place; return their tickets."""
        return self._wait(self._poll)

    def _poll(self) -> list[int]:
        """Poll all transports once; return the tickets whose rounds have ended."""
        done = [completion for transport in self._transports for completion in transport.completed()]
        if not done:
            return []
        for completion in done:
            self._record(completion)
        ended = {}
        for ticket in {completion.ticket: None for completion in done}:
            this = self._open[ticket]
            if not this.pending and not this.summed:
                self._sum(ticket, this)
            if this.summed and not this.unread_sends:
                ended[ticket] = self._open.pop(ticket)
        for ticket, index, data, borrowed in done:  # the sender must not wait for the other moves of this round
            if borrowed and ticket in self._open and not self._open[ticket].summed:
                self._open[ticket].arrivals[index] = copy_of(self._arithmetic, data)
                self._release(ticket, self._open[ticket], index)
        return list(ended)

    def _record(self, done: Completion) -> None:
        open_round = self._open[done.ticket]
        if open_round.copied[done.position]:
            open_round.unread_sends -= 1
        else:
            open_round.pending -= 1
            open_round.arrivals[done.position] = done.data

    def _sum(self, ticket: int, open_round: OpenRound) -> None:
        open_round.summed = True
        reduce_arrivals(self._rank, self._payload, self._arithmetic, open_round.moves, open_round.arrivals)
        for index, data in enumerate(open_round.arrivals):
            if data is not None and index not in open_round.released:
                self._release(ticket, open_round, index)
        open_round.arrivals.clear()

    def _release(self, ticket: int, open_round: OpenRound, index: int) -> None:
        open_round.released.add(index)
        self._by_peer[open_round.moves[index].peer].release(ticket, index)


def reduce_arrivals(
    rank: int, payload: Any, arithmetic: Arithmetic, moves: Sequence[Move], arrivals: Iterable[Any]
) -> None:
    """Reduce the data of a round's ADDs into `payload`, with the rank's own contribution at its position in the order.

    `arrivals` has an entry for each move; entries of other actions are ignored.
    """
    contributions: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for move, data in zip(moves, arrivals, strict=True):
        if move.action is Action.ADD and data is not None:
            contributions.setdefault((move.region.start, move.region.stop), []).append((move.peer, data))
    for (start, stop), parts in contributions.items():
        own = payload[start:stop]
        ordered = sorted([*parts, (rank, own)], key=lambda part: part[0])
        perform(arithmetic.reduce([part for _, part in ordered], own))
