"""Collectives as data: for each rank, lanes of rounds of transfers over chunks.

    program of one rank
    └── lanes      run side by side; each chunk belongs to one lane
        └── rounds     one after another; a round ends when all of its transfers have
            └── transfers  go together: SEND, RECEIVE (replace) or ADD (receive, then sum into place)

All readers of schedules (`verify`, `draw`, the players) follow these rules:

1. A transfer carries `span` neighbouring chunks, beginning with `chunk`. So recursive halving names half of the payload
   with one transfer, and a program with O(log p) messages has O(log p) entries.
2. A SEND carries the contents at the start of the round. The data of an ADD or a RECEIVE is in place at its end.
3. A round ends when its SENDs were received and its ADDs and RECEIVEs have arrived: nothing relies on buffering.
4. Between two ranks, within one lane, messages are received in the order they were sent.
5. All ADDs of one round into one chunk, and the rank's own contribution, are summed in the order of their ranks. So one
   round of `direct` computes the sum 0 + 1 + ... + (p-1), with the same bits on any rank.
6. A rank keeps the values that it has sent: a narrow wire rounds the sender's copy too. So a chunk has the same bits on
   all ranks if one rank makes its sum, or all sum copies with the same bits in the same order (as recursive doubling
   does); and if all that make a sum send it, or none.
7. No round is empty.

A rank makes its own program only, not those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from unisono.placement import Placement


class Action(Enum):
    """Action of a transfer on its chunks."""

    SEND = "send"
    RECEIVE = "receive"
    ADD = "add"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is that of its name, a call in Python


class Transfer(NamedTuple):
    """Message of one round, as described by one of its two ends."""

    action: Action
    peer: int
    chunk: int
    span: int = 1


Round = tuple[Transfer, ...]
Lane = tuple[Round, ...]


class Program(NamedTuple):
    """One rank's part of a schedule over a payload in `chunks` parts of nearly equal size."""

    chunks: int
    lanes: tuple[Lane, ...]
    landing: int = 1
    """Largest number of chunks that any rank receives at once to be summed, by the ADDs of one round.

    Equal on all ranks, because the length of the pieces depends on it.
    """
    columns: int = 1
    """Number of equal groups of consecutive lanes: each rank has ADDs in the lanes of one group at most."""
    landing_remote: int | None = None
    """Same as `landing`, for chunks from other nodes only; None if the schedule does not distinguish nodes."""
    steady: bool = False
    """True if each rank always receives from the same one or two ranks of other nodes. Equal on all ranks, too."""


Algorithm = Callable[[int, int], Program]
"""Function (rank, ranks) -> the program of that rank."""


def cuts_alike(algorithm: Algorithm, placement: Placement) -> bool:
    """Return True if the payload is cut in the same way in all rounds: the ranges of chunks of any two transfers are
    equal or have no chunk in common."""
    for rank in {0, max(placement.nodes, key=len)[-1]}:  # the same looked at on all ranks
        lanes = algorithm(rank, placement.ranks).lanes
        ranges = sorted({(t.chunk, t.chunk + t.span) for lane in lanes for transfers in lane for t in transfers})
        if any(stop > start for (_, stop), (start, _) in pairwise(ranges)):
            return False
    return True


class Family(NamedTuple):
    """Collectives of one algorithm: an allreduce, its two halves if they end at each rank's own chunk, and others."""

    allreduce: Algorithm
    reduce_scatter: Algorithm | None = None
    all_gather: Algorithm | None = None
    broadcast: Algorithm | None = None
    """Broadcast from rank 0; for another root `renumber` it by a rotation."""
    reduce: Algorithm | None = None
    """Reduction to rank 0, which alone ends with it; for another root `renumber` it by a rotation."""
    all_to_all: Algorithm | None = None
    """All-to-all of 2p chunks: chunk d < p goes to rank d, chunk p+s came from rank s, so the two ends of a transfer
    name different chunks. The own chunk is not transferred: the player of the schedule copies chunk r to chunk p+r.
    Chunks from 2p on, as many more as p or some times p, are those on their way to another rank."""


def others(rank: int, ranks: int) -> list[int]:
    """Return the other ranks, beginning with the next one, so that no rank is the first of all others."""
    return [*range(rank + 1, ranks), *range(rank)]


def send(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Return a transfer that sends the chunks to `peer`."""
    return Transfer(Action.SEND, peer, chunk, span)


def receive(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Return a transfer that replaces the chunks by those from `peer`."""
    return Transfer(Action.RECEIVE, peer, chunk, span)


def add(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Return a transfer that sums the chunks from `peer` into the own ones."""
    return Transfer(Action.ADD, peer, chunk, span)
