"""Transfers within a node for payloads in any memory: copied into the sender's mailbox, and read from there.

    sender      payload ──copy──▶ seat of the ticket in its pool;  word[receiver][seat][n] = tag
    receiver    sees its tag, sums from the pool or copies out;    word[receiver][seat][n] = 0     the SEND is complete

A ticket's seat is its number modulo the number of seats. A play has no more open tickets than seats, so that a seat is
free when a ticket needs it. Data for several ranks is copied in once. The messages from one rank to another within a
ticket are numbered, n, in the order of the schedule at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.mpi import MPI, least
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.reserve import populate, reserve_slots
from unisono.transports.room import SLOTS
from unisono.transports.transport import Done, Move
from unisono.transports.window import Window

MAX_SEATS = 256
"""Largest number of tickets that may be open at once."""

MAX_NUMBERED = 2
"""Largest number of messages from one rank to another in one round."""

ALIGNED = 64
"""Alignment of the beginning of a message, in bytes."""

FEWEST_PIECES = 4
"""Number of pieces under way for which pieces are made shorter: with fewer, the links between nodes idle."""


class Seats(NamedTuple):
    """Use of the mailboxes by a play: equal on all ranks."""

    largest: int
    """Number of elements of a piece's largest chunk."""
    at_once: int
    """Number of pieces under way at once."""
    tickets: int
    """Number of seats: pieces under way times lanes."""
    nbytes: int
    """Size of a seat in bytes."""


def plan_seats(pool: int, lanes: int, span: int, itemsize: int, largest: int, at_once: int) -> Seats | None:
    """Return the seats in a pool of `pool` bytes; None if it has no room.

    `span` is the largest number of chunks that a rank sends within its node in one round of one lane. `largest` and
    `at_once` are the preferred values for the network between the nodes.

    >>> plan_seats(6 << 20, 2, 8, 4, 16384, 16)
    Seats(largest=16384, at_once=5, tickets=10, nbytes=629120)
    """
    most = min(at_once, MAX_SEATS // lanes)

    def room(pieces: int) -> int:
        """Return the largest chunk, in elements, of which a seat holds `span`, each with an aligned beginning."""
        return max(0, pool // (lanes * pieces * span) - 2 * ALIGNED) // itemsize

    fitting = [pieces for pieces in range(1, most + 1) if room(pieces) >= largest]
    worth = [pieces for pieces in range(1, min(most, FEWEST_PIECES) + 1) if room(pieces)]
    at_once = max([*fitting, *worth], default=0)
    if not at_once:
        return None
    nbytes = pool // (lanes * at_once) // ALIGNED * ALIGNED
    return Seats(min(largest, room(at_once)), at_once, lanes * at_once, nbytes)


def span_within(program: Program, near: Sequence[int]) -> int:
    """Return the largest number of distinct chunks sent to the ranks `near` in one round of one lane."""

    def sent(transfers: Any) -> int:
        return sum(span for _, span in {(t.chunk, t.span) for t in transfers if _goes(t, near)})

    return max((sent(transfers) for lane in program.lanes for transfers in lane), default=0)


def numbered_within(program: Program, near: Sequence[int]) -> int:
    """Return the largest number of messages sent to one of the ranks `near` in one round of one lane."""
    counts = (
        max(Counter(t.peer for t in transfers if _goes(t, near)).values(), default=0)
        for lane in program.lanes
        for transfers in lane
    )
    return max(counts, default=0)


def _goes(transfer: Any, near: Sequence[int]) -> bool:
    return transfer.action is Action.SEND and transfer.peer in near


class Mailboxes:
    """Mailboxes in the shared memory of a node; all its ranks use and free them together."""

    def __init__(self, comm: MPI.Intracomm, pools: Window, words: Window, pool: int) -> None:
        """`pool` is the size in bytes of each rank's memory for sent data: equal on all nodes."""
        self.rank, self._comm, self._pools = comm.rank, comm, pools
        self.pool = pool
        self.contents: list[Array] = [np.frombuffer(buffer, np.uint8)[:pool] for buffer in pools.buffers]
        """Pools of all ranks, as bytes."""
        self._window, count = words, words.nbytes // 8
        self.lines = [memoryview(buffer)[: 8 * count].cast("q") for buffer in words.buffers]
        """Words of all ranks, two per sent message: its tag, or 0 for no message, and its offset in the pool."""
        self.lines[self.rank][:] = memoryview(bytes(8 * count)).cast("q")
        self.fence = self._window.sync
        self.fence()
        comm.Barrier()

    @staticmethod
    def word(receiver: int, seat: int, number: int) -> int:
        """Return the index of a message's words in its sender's line."""
        return 2 * ((receiver * MAX_SEATS + seat) * MAX_NUMBERED + number % MAX_NUMBERED)

    def free(self) -> None:
        """Free the memory."""
        self.contents.clear()
        for line in self.lines:
            line.release()
        self._window.free()
        self._pools.free()
        self._comm.Free()


def make_mailboxes(comm: MPI.Intracomm, node: int) -> Mailboxes | None:
    """Return new mailboxes for the nodes of `comm`, on all its ranks together; None on all if one has no room.

    `node` is the number of this rank's node.
    """
    near: MPI.Intracomm = comm.Split(node, comm.rank)  # type: ignore[assignment]
    nbytes = 16 * near.size * MAX_SEATS * MAX_NUMBERED
    pools, slot = reserve_slots(near, nbytes)
    words = Window(near, nbytes)
    has_room = populate(np.frombuffer(words.own, np.uint8))
    pool = least(comm, SLOTS * slot if has_room else 0)
    if pool and pools is not None:
        return Mailboxes(near, pools, words, pool)
    for window in filter(None, (pools, words)):
        window.free()
    near.Free()
    return None


class _Word(NamedTuple):
    """Move, and the value of its word once it has completed."""

    line: memoryview
    word: int
    value: int
    """Tag of an awaited message; 0 for a sent message."""
    ticket: int
    move: Move


def _changed(words: list[_Word]) -> list[_Word]:
    """Remove and return the entries whose word has the value of a completed move."""
    places = [place for place, one in enumerate(words) if one.line[one.word] == one.value]
    return [words.pop(place) for place in reversed(places)]


class MailboxTransport:
    """Transport for the moves of one play within a node.

    `memory` holds the payload as bytes, which `arithmetic` views as numbers. `near` lists the ranks of the node in
    their order there. `fingerprint` is a number below 2^32 that is equal on ranks in the same call.
    """

    copies = True

    def __init__(
        self,
        mailboxes: Mailboxes,
        near: Sequence[int],
        seats: Seats,
        memory: Any,
        itemsize: int,
        arithmetic: Arithmetic,
        fingerprint: int,
    ) -> None:
        self._boxes, self._seats = mailboxes, seats
        self._place = {rank: place for place, rank in enumerate(near)}
        self._payload: Array = np.frombuffer(memory, np.uint8)
        self._itemsize, self._arithmetic = itemsize, arithmetic
        self._tag = 1 << 62 | fingerprint << 30
        self._sent: Counter[tuple[int, int]] = Counter()  # messages of (ticket, peer) so far
        self._taken: Counter[tuple[int, int]] = Counter()
        self._offered: list[_Word] = []
        self._awaited: list[_Word] = []
        self._lent: dict[tuple[int, int], tuple[int, int]] = {}  # the sender's place, and that of the word

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Copy the sent data into the ticket's seat, and set the words of the messages."""
        boxes, seat = self._boxes, ticket % self._seats.tickets
        at = seat * self._seats.nbytes
        own, line, copied = boxes.contents[boxes.rank], boxes.lines[boxes.rank], dict[tuple[int, int], int]()
        for move in moves:
            if move.action is not Action.SEND:
                number, tag = self._number(self._taken, ticket, move.peer)
                theirs = boxes.lines[self._place[move.peer]]
                self._awaited.append(_Word(theirs, boxes.word(boxes.rank, seat, number), tag, ticket, move))
                continue
            first, stop = move.where.start * self._itemsize, move.where.stop * self._itemsize
            if (first, stop) not in copied:
                own[at : at + stop - first] = self._payload[first:stop]
                copied[first, stop] = at
                at += -(-(stop - first) // ALIGNED) * ALIGNED
            number, tag = self._number(self._sent, ticket, move.peer)
            word = boxes.word(self._place[move.peer], seat, number)
            if line[word]:
                raise UsageError("a call before this one was interrupted while others took part: use another world")
            line[word + 1] = copied[first, stop]
            boxes.fence()
            line[word] = tag
            self._offered.append(_Word(line, word, 0, ticket, move))

    def completed(self) -> list[Done]:
        """Check the words of awaited and of sent messages once; return the completed moves."""
        self._boxes.fence()
        done = [self._take(one) for one in _changed(self._awaited)]
        done += [Done(one.ticket, one.move.place) for one in _changed(self._offered)]
        return done

    def release(self, ticket: int, place: int) -> None:
        """Report to the sender that its message was read."""
        sender, word = self._lent.pop((ticket, place))
        self._boxes.fence()
        self._boxes.lines[sender][word] = 0

    def _take(self, one: _Word) -> Done:
        _, word, _, ticket, move = one
        boxes, sender = self._boxes, self._place[move.peer]
        boxes.fence()
        first, stop = move.where.start * self._itemsize, move.where.stop * self._itemsize
        at = boxes.lines[sender][word + 1]
        content = boxes.contents[sender][at : at + stop - first]
        self._lent[ticket, move.place] = sender, word
        if move.action is Action.ADD:
            return Done(ticket, move.place, self._arithmetic.view(content), lent=True)
        self._payload[first:stop] = content
        self.release(ticket, move.place)
        return Done(ticket, move.place)

    def _number(self, counts: Counter[tuple[int, int]], ticket: int, peer: int) -> tuple[int, int]:
        """Count the next message of a ticket with a peer; return its number and its tag."""
        number = counts[ticket, peer]
        counts[ticket, peer] = number + 1
        return number, self._tag | (ticket & 0xFFFFF) << 10 | number & 0x3FF
