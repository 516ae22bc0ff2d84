"""Transfers within a node for payloads in any memory: copied into the sender's mailbox, and read from there.

    sender      payload ──copy──▶ seat of the ticket in its pool;  word[receiver][seat][n] = tag
    receiver    sees its tag, sums from the pool or copies out;    word[receiver][seat][n] = 0     the SEND is complete

A ticket's seat is its number modulo the number of seats. A play has no more open tickets than seats, so that a seat is
free when a ticket needs it. Data for several ranks is copied in once. The messages from one rank to another within a
ticket are numbered, n, in the order of the schedule at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.schedule import Action, Program, Transfer
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import Completion, Move
from unisono.transports.window import SLOTS_PER_RANK, Window, populate, reserve_slots

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


def chunks_sent_within(program: Program, node_ranks: Sequence[int]) -> int:
    """Return the largest number of distinct chunks sent to `node_ranks` in one round of one lane."""
    distinct = ({(t.chunk, t.span) for t in sent} for sent in _sent_to(program, node_ranks))
    return max((sum(span for _, span in chunks) for chunks in distinct), default=0)


def messages_per_peer(program: Program, node_ranks: Sequence[int]) -> int:
    """Return the largest number of messages sent to one of `node_ranks` in one round of one lane."""
    counts = (Counter(t.peer for t in sent) for sent in _sent_to(program, node_ranks))
    return max((most for count in counts for most in count.values()), default=0)


def _sent_to(program: Program, ranks: Sequence[int]) -> Iterator[list[Transfer]]:
    """Yield what each round of each lane sends to some ranks."""
    for transfers in (transfers for lane in program.lanes for transfers in lane):
        yield [t for t in transfers if t.action is Action.SEND and t.peer in ranks]


class Mailboxes:
    """Mailboxes in the shared memory of a node; all its ranks use and free them together."""

    def __init__(self, comm: MPI.Intracomm, pools: Window, words: Window, pool: int) -> None:
        """`pool` is the size in bytes of each rank's memory for sent data: equal on all nodes."""
        self.rank, self._comm, self._pools = comm.rank, comm, pools
        self.pool = pool
        self.contents: list[Array] = [np.frombuffer(buffer, np.uint8)[:pool] for buffer in pools.buffers]
        """Pools of all ranks, as bytes."""
        self._window, count = words, words.nbytes // 8
        self.rows = [memoryview(buffer)[: 8 * count].cast("q") for buffer in words.buffers]
        """Words of all ranks, two per sent message: its tag, or 0 for no message, and its offset in the pool."""
        self.rows[self.rank][:] = memoryview(bytes(8 * count)).cast("q")
        self.fence = self._window.sync
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
        self._pools.free()
        self._comm.Free()


def make_mailboxes(comm: MPI.Intracomm, node: int) -> Mailboxes | None:
    """Return new mailboxes for the nodes of `comm`, on all its ranks together; None on all if one lacks memory.

    `node` is the number of this rank's node.
    """
    node_comm: MPI.Intracomm = comm.Split(node, comm.rank)  # type: ignore[assignment]
    nbytes = 16 * node_comm.size * MAX_SEATS * MAX_MESSAGES_PER_PEER
    pools, slot = reserve_slots(node_comm, nbytes)
    words = Window(node_comm, nbytes)
    populated = populate(np.frombuffer(words.own, np.uint8))
    pool = allreduce_min(comm, SLOTS_PER_RANK * slot if populated else 0)
    if pool and pools is not None:
        return Mailboxes(node_comm, pools, words, pool)
    for window in filter(None, (pools, words)):
        window.free()
    node_comm.Free()
    return None


class _Word(NamedTuple):
    """Move, and the value of its word once it has completed."""

    row: memoryview
    word: int
    value: int
    """Tag of an expected message; 0 for a sent message."""
    ticket: int
    move: Move


def _pop_completed(pending: list[_Word]) -> list[_Word]:
    """Remove and return the entries whose word has the value of a completed move."""
    indices = [index for index, entry in enumerate(pending) if entry.row[entry.word] == entry.value]
    return [pending.pop(index) for index in reversed(indices)]


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
        itemsize: int,
        arithmetic: Arithmetic,
        fingerprint: int,
    ) -> None:
        self._boxes, self._seats = mailboxes, seats
        self._index = {rank: index for index, rank in enumerate(node_ranks)}
        self._payload: Array = np.frombuffer(memory, np.uint8)
        self._itemsize, self._arithmetic = itemsize, arithmetic
        self._tag = 1 << 62 | fingerprint << 30
        self._sent: Counter[tuple[int, int]] = Counter()  # messages of (ticket, peer) so far
        self._taken: Counter[tuple[int, int]] = Counter()
        self._sends: list[_Word] = []
        self._receives: list[_Word] = []
        self._borrowed: dict[tuple[int, int], tuple[int, int]] = {}  # index of the sender, and of the word

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Copy the sent data into the ticket's seat, and set the words of the messages."""
        boxes, seat = self._boxes, ticket % self._seats.tickets
        offset = seat * self._seats.nbytes
        pool, row, copied = boxes.contents[boxes.rank], boxes.rows[boxes.rank], dict[tuple[int, int], int]()
        for move in moves:
            if move.action is not Action.SEND:
                message_index, tag = self._number(self._taken, ticket, move.peer)
                theirs = boxes.rows[self._index[move.peer]]
                self._receives.append(_Word(theirs, boxes.word(boxes.rank, seat, message_index), tag, ticket, move))
                continue
            first, stop = move.region.start * self._itemsize, move.region.stop * self._itemsize
            if (first, stop) not in copied:
                pool[offset : offset + stop - first] = self._payload[first:stop]
                copied[first, stop] = offset
                offset += -(-(stop - first) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            message_index, tag = self._number(self._sent, ticket, move.peer)
            word = boxes.word(self._index[move.peer], seat, message_index)
            if row[word]:
                raise UsageError(
                    "an earlier call of this world was interrupted while other ranks took part in it; make a new world"
                )
            row[word + 1] = copied[first, stop]
            boxes.fence()
            row[word] = tag
            self._sends.append(_Word(row, word, 0, ticket, move))

    def completed(self) -> list[Completion]:
        """Check the words of expected and of sent messages once; return the completed moves."""
        self._boxes.fence()
        done = [self._take(entry) for entry in _pop_completed(self._receives)]
        done += [Completion(entry.ticket, entry.move.position) for entry in _pop_completed(self._sends)]
        return done

    def release(self, ticket: int, position: int) -> None:
        """Report to the sender that its message was read."""
        sender, word = self._borrowed.pop((ticket, position))
        self._boxes.fence()
        self._boxes.rows[sender][word] = 0

    def _take(self, entry: _Word) -> Completion:
        _, word, _, ticket, move = entry
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

    def _number(self, counts: Counter[tuple[int, int]], ticket: int, peer: int) -> tuple[int, int]:
        """Count the next message of a ticket with a peer; return its index and its tag."""
        message_index = counts[ticket, peer]
        counts[ticket, peer] = message_index + 1
        return message_index, self._tag | (ticket & 0xFFFFF) << 10 | message_index & 0x3FF
