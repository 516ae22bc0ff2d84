"""Sockets between the ranks of a group on several nodes, and the programs of messages that go through them.

    connect    every rank listens, tells the others its addresses and its port by MPI, and connects to all higher ranks
    hello      | secret of the group | from | to |     a connection with another is closed; nothing listens afterwards
    message    | token | payload ... |                 the token is equal on all ranks in the same call

A program is a schedule's, at addresses, in the rows of `steps.py`: the messages of a round, then the reductions of what
has arrived, in the order of ranks. Long messages go in segments, each reduced while the kernel receives the next:

    send 1, 2 │ receive 1 │ add 1 │ receive 2 │ add 2 │ send 1, 2 │ receive 1 │ ...      2 may still be on its way
                          PART                PART                            PART        until its memory is needed

`_messenger.c` plays it in one call, without Python's lock, and waits by sleeping in the kernel: ranks that share a core
hand it over, and the training that runs beside an exchange has the core. Without compiled code there are no sockets.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from fcntl import ioctl
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.pieces import Cut
from unisono.schedules.schedule import Action, Program
from unisono.transports.arithmetic import Arithmetic, perform
from unisono.transports.barriers import is_compiled
from unisono.transports.compiled import compiled
from unisono.transports.steps import Row, RowKind, end_of, reduction, steps_of

VARIABLE = "UNISONO_SOCKETS"
"""Environment variable: "off", on one rank at least, leaves collectives to the MPI library and to its messages; "on",
on one at least, takes sockets; else the name of the interface that others reach this host by, such as "eth0"."""

MAX_RANKS = 64
"""Largest number of ranks of a group: each has a socket for each other."""

CONNECT_SECONDS = 2.0
"""Seconds in which a rank connects to all others. A firewall makes the first call of each group take as long."""

ADDRESS_SECONDS = 0.5
"""Seconds in which an address answers, before the next one of the same host is tried."""

ACCEPT_SECONDS = 0.05
"""Seconds of a wait for the next connection, and for what it says."""

SECRET_BYTES = 16

SOURCE, TARGET = -(1 << 62), -(1 << 61)
"""First address in the source and in the target of a call."""

YIELDS = 64
"""Polls before a rank sleeps, some tens of microseconds: as long as a message takes."""

LONG_YIELDS = 1
"""The same in a program with messages of a segment, which take longer than to fall asleep and to wake."""

SEGMENT_BYTES = 256 << 10
"""Bytes of a segment: as much as stays in a core's cache until it is reduced."""

MAX_SEGMENTS = 64
"""Segments of a message at most: each poll looks at all."""

CONNECTION = np.dtype([("descriptor", np.int32), ("read_ahead", np.uint8, 4092)])
"""One rank's socket, -1 for this one, and what compiled code has read ahead from it."""

SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


class Interruption(IntEnum):
    """Reason why compiled code calls Python; `_messenger.c` has the same numbers."""

    LATE = 1
    MISMATCH = 2
    REDUCTION = 3


MESSAGES = RowKind.SEND, RowKind.RECEIVE

Message = tuple[Action, int, slice]
"""Action of a rank, the other rank, and the elements of the payload."""


class Payload(NamedTuple):
    """Payload of a program: where it lies, how it is cut, and how it is reduced."""

    addresses: tuple[int, ...]
    """Addresses of its equal parts: of memory that is kept alive; or SOURCE, TARGET, those that are given in a call."""
    cut: Cut
    arithmetic: Arithmetic
    kind: RowKind
    """Kind of reduction."""

    def address_of(self, region: slice) -> int:
        part, begin = divmod(int(region.start), max(1, self.cut.length // len(self.addresses)))
        return self.addresses[part] + begin * self.arithmetic.itemsize

    def segments_of(self, region: slice) -> list[slice]:
        return segments_of(region, self.arithmetic.itemsize, self.cut.grain)


class Sockets:
    """Connections of one rank to all others of a group."""

    def __init__(self, connected: Sequence[socket.socket | None]) -> None:
        self._connected = connected
        self._connections = np.zeros(len(connected), CONNECTION)
        self._connections["descriptor"] = [-1 if link is None else link.fileno() for link in connected]

    def player_of(
        self,
        rows: Sequence[Row],
        arithmetic: Arithmetic,
        late: Callable[[], None],
        mismatch: Callable[[int], None],
    ) -> Callable[[int, int, int], None]:
        """Return the function (token, source, target) that plays rows. The caller keeps their memory alive; rows that
        are not compiled name no places in source and target.

        `late` is called regularly in waits, and raises to end them; `mismatch`, which raises, with the rank whose
        message has another token.
        """
        uncompiled = {
            index: [*steps_of(rows[index : end_of(rows, index)], arithmetic)]
            for index, row in enumerate(rows)
            if row.kind is RowKind.OTHER
        }

        def handle(event: int, index: int) -> None:
            if event == Interruption.LATE:
                late()
            elif event == Interruption.MISMATCH:
                mismatch(index)
            else:
                perform(uncompiled[index])

        table = np.array(rows, np.int64).reshape(-1, 5)
        messages = table[np.isin(table[:, 0], MESSAGES), 1]
        yields = LONG_YIELDS if messages.max(initial=0) >= SEGMENT_BYTES else YIELDS
        return compiled.make_messenger(self._connections, table, yields, handle)  # type: ignore[no-any-return]

    def end(self) -> None:
        """End all connections. Their numbers stay taken, since another thread may wait for them."""
        for connection in filter(None, self._connected):
            with suppress(OSError):  # the other rank has ended it before
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, which nobody uses any more."""
        for connection in filter(None, self._connected):
            connection.close()


def rows_of(rank: int, program: Program, payload: Payload, landing: int) -> Iterator[Row]:
    """Yield the rows of a program. What is received to be summed lands from the address `landing` on."""
    leaving: list[slice] = []
    for moves in _moves(program, payload.cut):
        yield from _round(rank, moves, payload, landing, leaving)
    if leaving:
        yield Row(RowKind.ROUND)


def landing_bytes(program: Program, payload: Payload) -> int:
    """Return the largest number of bytes that a program receives at once to be summed."""
    parts = chain(*(_arrivals(moves, payload) for moves in _moves(program, payload.cut)))
    elements = max((sum(map(_length, _regions(part, Action.ADD))) for part in parts), default=0)
    return elements * payload.arithmetic.itemsize


def _moves(program: Program, cut: Cut) -> Iterator[list[Message]]:
    """Yield the messages of each round of each piece, in the same order on all ranks. A piece follows the one before,
    one round behind: while one is reduced, the other is on its way."""
    for lane in program.lanes:
        for step in range(len(lane) + cut.pieces - 1):
            for piece in range(max(0, step - len(lane) + 1), min(cut.pieces, step + 1)):
                yield [
                    (action, peer, cut.region(piece, chunk, span)) for action, peer, chunk, span in lane[step - piece]
                ]


def segments_of(region: slice, itemsize: int, grain: int = 1) -> list[slice]:
    """Return the segments of a message, by which both ends cut it: they depend on its length alone. Each, but the last,
    has a multiple of `grain` elements.

    >>> segments_of(slice(0, 100), 4), segments_of(slice(100_000, 200_000), 4)
    ([slice(0, 100, None)], [slice(100000, 165536, None), slice(165536, 200000, None)])
    """
    start, stop = int(region.start), int(region.stop)
    length = -(-max(SEGMENT_BYTES // itemsize, -(-(stop - start) // MAX_SEGMENTS)) // grain) * grain
    return [slice(begin, min(stop, begin + length)) for begin in range(start, stop, length)] or [region]


def _arrivals(moves: Sequence[Message], payload: Payload) -> list[list[Message]]:
    """Return what a rank waits for at once: a segment of each other rank, or all where it adds to what it sends in the
    round, or where segments of one region would not arrive together."""
    received: dict[int, list[Message]] = {}  # by rank, in order
    for action, peer, region in moves:
        if action is not Action.SEND:
            received.setdefault(peer, []).extend((action, peer, part) for part in payload.segments_of(region))
    parts = [[*filter(None, part)] for part in zip_longest(*received.values())]
    added = [{(region.start, region.stop) for region in _regions(part, Action.ADD)} for part in parts]
    together = sum(map(len, added)) == len(set().union(*added))
    if together and not _meet(_regions(moves, Action.SEND), _regions(moves, Action.ADD)):
        return parts
    return [[*chain(*parts)]]


def _round(rank: int, moves: Sequence[Message], payload: Payload, landing: int, leaving: list[slice]) -> Iterator[Row]:
    """Yield the rows of a round. `leaving` are the regions whose messages to others may not have gone: they go on in
    later rounds, until their memory is needed."""
    itemsize, address_of = payload.arithmetic.itemsize, payload.address_of
    if payload.cut.length:  # both ends omit the same empty ones; a barrier has no others
        moves = [move for move in moves if _length(move[-1])]
    sent, added = _regions(moves, Action.SEND), _regions(moves, Action.ADD)
    if _meet(leaving, [*added, *_regions(moves, Action.RECEIVE)]):
        leaving.clear()
        yield Row(RowKind.ROUND)
    leaving += sent
    for action, peer, region in moves:
        if action is Action.SEND:
            for segment in payload.segments_of(region):
                yield Row(RowKind.SEND, _length(segment) * itemsize, 0, address_of(segment), peer)
    for part in _arrivals(moves, payload):
        place, contributions = landing, dict[tuple[int, int], list[tuple[int, int]]]()  # by region: rank and address
        for action, peer, segment in part:
            nbytes = _length(segment) * itemsize
            adds = action is Action.ADD and nbytes > 0
            yield Row(RowKind.RECEIVE, nbytes, place if adds else address_of(segment), 0, peer)
            if adds:
                own = [(rank, address_of(segment))]
                contributions.setdefault((segment.start, segment.stop), own).append((peer, place))
                place += nbytes
        if _meet(sent, added):
            leaving.clear()
            yield Row(RowKind.ROUND)
        else:
            yield Row(RowKind.PART)
        for (start, stop), parts in contributions.items():
            addresses = [address for _, address in sorted(parts)]
            yield from reduction(payload.kind, address_of(slice(start, stop)), addresses, stop - start)


def _regions(moves: Iterable[Message], action: Action) -> list[slice]:
    return [region for act, _, region in moves if act is action]


def _meet(regions: Sequence[slice], others: Sequence[slice]) -> bool:
    """Return True where some elements are in regions of both."""
    return any(region.start < other.stop and other.start < region.stop for region in regions for other in others)


def _length(region: slice) -> int:
    return int(region.stop - region.start)


def open_sockets(comm: MPI.Intracomm) -> Sockets | None:
    """Connect all ranks of a communicator; they call it together. Return None on all ranks if any rank cannot."""
    wanted = os.environ.get(VARIABLE, "")
    able = is_compiled() and comm.size <= MAX_RANKS and wanted != "off"
    with ExitStack() as stack:
        listener = None
        with suppress(OSError):
            listener = stack.enter_context(socket.create_server(("", 0), backlog=MAX_RANKS)) if able else None
        reachable = comm.allgather(None if listener is None else (_addresses(wanted), listener.getsockname()[1]))
        secret = comm.bcast(os.urandom(SECRET_BYTES))
        for rank, place in enumerate(reachable):
            if place is not None and not place[0]:
                raise UsageError(
                    f"rank {rank}: {VARIABLE} names no interface of its host with an IPv4 address: see `ip a`"
                )
        if any(place is None for place in reachable):
            return None
        connected = [*_connect(comm.rank, listener, reachable, secret)]  # which a late answer does not change
        sockets = Sockets(connected)
        if not allreduce_min(comm, connected.count(None) == 1):
            sockets.close()
            return None
    for connection in filter(None, connected):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return sockets


def addresses_of_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _addresses(wanted: str) -> list[str]:
    """Return the IPv4 addresses of this host that others may reach, those of faster interfaces first."""
    known = addresses_of_interfaces().items()
    rated = [(-_speed(name), address) for name, address in known if wanted in ("", "on", name)]
    reached = [address for _, address in sorted(rated) if not address.startswith("127.")]
    return reached or ["127.0.0.1"] * (bool(rated) or wanted in ("", "on"))


def _speed(name: str) -> int:
    """Return the megabits per second of an interface; 0 if it does not say."""
    try:
        return int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return 0


def _connect(rank: int, listener: Any, reachable: Sequence[Any], secret: bytes) -> list[socket.socket | None]:
    """Return the connections to all ranks; None in the place of those that could not be reached."""
    connected: list[socket.socket | None] = [None] * len(reachable)
    deadline = time.monotonic() + CONNECT_SECONDS

    def hello(source: int, target: int) -> bytes:
        return secret + struct.pack("!II", source, target)

    def answer(connection: socket.socket) -> None:
        with suppress(OSError):  # a stranger says nothing
            connection.settimeout(ADDRESS_SECONDS)
            said = _read(connection, len(hello(0, 0)))
            for source in range(rank):
                if said == hello(source, rank):
                    connection.sendall(hello(rank, source))
                    connected[source] = connection
                    return
        connection.close()

    def accept() -> None:
        while None in connected[:rank] and time.monotonic() < deadline:
            with suppress(OSError):  # nobody for a while
                listener.settimeout(ACCEPT_SECONDS)
                answering = threading.Thread(target=answer, args=(listener.accept()[0],), name="unisono answers")
                answering.start()
                answering.join(ACCEPT_SECONDS)  # a stranger may take longer; after the last one nobody is waited for

    accepting = threading.Thread(target=accept, name="unisono connects")
    accepting.start()
    for peer in range(rank + 1, len(reachable)):
        addresses, port = reachable[peer]
        for address in addresses:
            if connected[peer] is None and time.monotonic() < deadline:
                with suppress(OSError):  # this address does not lead there; the next one may
                    connection = socket.create_connection((address, port), ADDRESS_SECONDS)
                    connection.sendall(hello(rank, peer))
                    if _read(connection, len(hello(0, 0))) == hello(peer, rank):
                        connected[peer] = connection
                    else:
                        connection.close()
    accepting.join()
    return connected


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Return so many bytes that arrive; fewer if the connection ends."""
    content = b""
    while len(content) < nbytes and (more := connection.recv(nbytes - len(content))):
        content += more
    return content
