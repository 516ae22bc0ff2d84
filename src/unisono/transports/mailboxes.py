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
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import Completion, Move
from unisono.transports.window import SLOTS_PER_RANK, Window, reserve_slots

MAX_SEATS = 256
"""Largest number of tickets that may be open at once."""

MAX_MESSAGES_PER_PEER = 2
"""Largest number of messages from one rank to another in one round."""

ALIGNMENT_BYTES = 64
"""Alignment of the beginning of a message, in bytes."""

MIN_PIECES_IN_FLIGHT = 4
"""Number of pieces under way for which pieces are made shorter: with fewer, the links between nodes idle."""


class Seats(NamedTuple):
    """Use of the mailboxes by a play: equal on all ranks."""

    chunk_length: int
    """Number of elements of a piece's largest chunk."""
    in_flight: int
    """Number of pieces under way at once."""
    tickets: int
    """Number of seats: pieces under way times lanes."""
    nbytes: int
    """Size of a seat in bytes."""


def plan_seats(pool: int, lanes: int, span: int, itemsize: int, chunk_length: int, in_flight: int) -> Seats | None:
    """Return the seats in a pool of `pool` bytes; None if the pool is too small.

    `span` is the largest number of chunks that a rank sends within its node in one round of one lane.
    `chunk_length` and `in_flight` are the preferred values for the network between the nodes.

    >>> plan_seats(6 << 20, 2, 8, 4, 16384, 16)
    Seats(chunk_length=16384, in_flight=5, tickets=10, nbytes=629120)
    """
    most = min(in_flight, MAX_SEATS // lanes)

    def chunk_capacity(pieces: int) -> int:
        """Return the largest chunk, in elements, of which a seat holds `span`, each with an aligned beginning."""
        return max(0, pool // (lanes * pieces * span) - 2 * ALIGNMENT_BYTES) // itemsize

    fitting = [pieces for pieces in range(1, most + 1) if chunk_capacity(pieces) >= chunk_length]
    worth = [pieces for pieces in range(1, min(most, MIN_PIECES_IN_FLIGHT) + 1) if chunk_capacity(pieces)]
    in_flight = max([*fitting, *worth], default=0)
    if not in_flight:
        return None
    nbytes = pool // (lanes * in_flight) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return Seats(min(chunk_length, chunk_capacity(in_flight)), in_flight, lanes * in_flight, nbytes)


def sent_within(program: Program, node_ranks: Sequence[int]) -> tuple[int, int]:
    """Return the largest number of distinct chunks sent to `node_ranks` in one round of one lane, and of messages to
    one of them."""
    chunks = messages = 0
    for transfers in chain(*program.lanes):
        sent = [t for t in transfers if t.action is Action.SEND and t.peer in node_ranks]
        chunks = max(chunks, sum(span for _, span in {(t.chunk, t.span) for t in sent}))
        messages = max([messages, *Counter(t.peer for t in sent).values()])
    return chunks, messages


class Mailboxes:
    """Mailboxes in the shared memory of a node; all its ranks use and free them together."""

    def __init__(self, comm: MPI.Intracomm, window: Window, words_at: int, pool: int) -> None:
        """`pool` is the size in bytes of each rank's memory for sent data: equal on all nodes. The words of a rank
        begin `words_at` bytes after the beginning of its pool."""
        self.rank, self._comm, self._window = comm.rank, comm, window
        self.pool = pool
        self.contents: list[Array] = [np.frombuffer(buffer, np.uint8)[:pool] for buffer in window.buffers]
        """Pools of all ranks, as bytes."""
        self.rows = [memoryview(buffer)[words_at : window.nbytes].cast("q") for buffer in window.buffers]
        """Words of all ranks, two per sent message: its tag, or 0 for no message, and its offset in the pool."""
        own = self.rows[self.rank]
        own[:] = memoryview(bytes(own.nbytes)).cast("q")
        self.fence = window.sync
        self.fence()
        comm.Barrier()

    @staticmethod
    def word(receiver: int, seat: int, message_index: int) -> int:
        """Return the index of a message's words in its sender's row."""
        return 2 * ((receiver * MAX_SEATS + seat) * MAX_MESSAGES_PER_PEER + message_index % MAX_MESSAGES_PER_PEER)

    def free(self) -> None:
        self.contents.clear()
        for row in self.rows:
            row.release()
        self._window.free()
        self._comm.Free()


def make_mailboxes(comm: MPI.Intracomm, node: int) -> Mailboxes | None:
    """Return new mailboxes for the nodes of `comm`, on all its ranks together; None on all if one lacks memory.

    `node` is the number of this rank's node.
    """
    node_comm: MPI.Intracomm = comm.Split(node, comm.rank)  # type: ignore[assignment]
    words_bytes = 16 * node_comm.size * MAX_SEATS * MAX_MESSAGES_PER_PEER
    window, slot = reserve_slots(node_comm, words_bytes)
    pool = allreduce_min(comm, SLOTS_PER_RANK * slot)
    if window is not None and pool:
        return Mailboxes(node_comm, window, SLOTS_PER_RANK * slot, pool)
    if window is not None:
        window.free()
    node_comm.Free()
    return None


class _Word(NamedTuple):
    """Move, and its word, which has `value` once the message was written, or read."""

    row: memoryview
    word: int
    value: int
    """Tag of an expected message; 0 for a sent message."""
    ticket: int
    move: Move


class MailboxTransport:
    """Transport for the moves of one play within a node.

    `memory` holds the payload as bytes, which `arithmetic` views as numbers. `node_ranks` lists the ranks of the node
    in their order there. `fingerprint` is a number below 2^32 that is equal on ranks in the same call.
    """

    copies = True

    def __init__(
        self,
        mailboxes: Mailboxes,
        node_ranks: Sequence[int],
        seats: Seats,
        memory: Any,
        arithmetic: Arithmetic,
        fingerprint: int,
    ) -> None:
        self._boxes, self._seats = mailboxes, seats
        self._index = {rank: index for index, rank in enumerate(node_ranks)}
        self._payload: Array = np.frombuffer(memory, np.uint8)
        self._itemsize, self._arithmetic = arithmetic.itemsize, arithmetic
        self._tag = 1 << 62 | fingerprint << 30
        self._begun: Counter[tuple[bool, int, int]] = Counter()  # messages so far: True for sent ones, ticket, peer
        self._pending: list[_Word] = []
        self._borrowed: dict[tuple[int, int], tuple[int, int]] = {}  # index of the sender, and of the word

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Copy the sent data into the ticket's seat, and set the words of the messages."""
        boxes, seat = self._boxes, ticket % self._seats.tickets
        offset = seat * self._seats.nbytes
        pool, row, copied = boxes.contents[boxes.rank], boxes.rows[boxes.rank], dict[tuple[int, int], int]()
        for move in moves:
            sends, peer = move.action is Action.SEND, self._index[move.peer]
            message_index = self._begun[sends, ticket, peer]
            self._begun[sends, ticket, peer] += 1
            tag = self._tag | (ticket & 0xFFFFF) << 10 | message_index & 0x3FF
            if not sends:
                word = boxes.word(boxes.rank, seat, message_index)
                self._pending.append(_Word(boxes.rows[peer], word, tag, ticket, move))
                continue
            first, stop = move.region.start * self._itemsize, move.region.stop * self._itemsize
            if (first, stop) not in copied:
                pool[offset : offset + stop - first] = self._payload[first:stop]
                copied[first, stop] = offset
                offset += -(-(stop - first) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            word = boxes.word(peer, seat, message_index)
            if row[word]:
                raise UsageError(
                    "an earlier call of this world was interrupted while other ranks took part in it; make a new world"
                )
            row[word + 1] = copied[first, stop]
            boxes.fence()
            row[word] = tag
            self._pending.append(_Word(row, word, 0, ticket, move))

    def completed(self) -> list[Completion]:
        """Check the words of expected and of sent messages once; return the completed moves."""
        self._boxes.fence()
        indices = [index for index, entry in enumerate(self._pending) if entry.row[entry.word] == entry.value]
        done = [self._take(self._pending[index]) for index in indices]
        for index in reversed(indices):
            del self._pending[index]
        return done

    def release(self, ticket: int, position: int) -> None:
        """Report to the sender that its message was read."""
        sender, word = self._borrowed.pop((ticket, position))
        self._boxes.fence()
        self._boxes.rows[sender][word] = 0

    def _take(self, entry: _Word) -> Completion:
        _, word, _, ticket, move = entry
        if move.action is Action.SEND:
            return Completion(ticket, move.position)
        boxes, sender = self._boxes, self._index[move.peer]
        boxes.fence()
        first, stop = move.region.start * self._itemsize, move.region.stop * self._itemsize
        offset = boxes.rows[sender][word + 1]
        content = boxes.contents[sender][offset : offset + stop - first]
        self._borrowed[ticket, move.position] = sender, word
        if move.action is Action.ADD:
            return Completion(ticket, move.position, self._arithmetic.view(content), borrowed=True)
        self._payload[first:stop] = content
        self.release(ticket, move.position)
        return Completion(ticket, move.position)
