"""A collective as data: for each rank, lanes of rounds of transfers over chunks.

    program of one rank
    └── lanes      run side by side; each chunk belongs to one lane
        └── rounds     one after another; a round ends when all of its transfers have
            └── transfers  go together: SEND, RECEIVE (replace) or ADD (receive, then sum into place)

The rules that every reader (`verify`, `draw`, the players) follows:

1. A transfer carries `span` neighbouring chunks, beginning with `chunk`. So recursive halving names half of the payload
   with one transfer, and a program has O(log p) entries where it has O(log p) messages.
2. A SEND carries what the rank held when the round began. What an ADD or a RECEIVE brings is in place when it ends.
3. A round ends when its SENDs were taken and its ADDs and RECEIVEs have arrived: nothing relies on buffering.
4. Between two ranks, within one lane, messages are taken in the order they were sent.
5. All ADDs of one round into one chunk, and the rank's own contribution, are summed in the order of their ranks. So one
   round of `direct` gives the sum 0 + 1 + ... + (p-1), bit for bit the same wherever it is made.

A rank's program is made without making the others', so a schedule costs a rank the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class Action(Enum):
    """What a transfer does with its chunks."""

    SEND = "send"
    RECEIVE = "receive"
    ADD = "add"


class Transfer(NamedTuple):
    """One message of one round, seen from one of its two ends."""

    action: Action
    peer: int
    chunk: int
    span: int = 1


Round = tuple[Transfer, ...]
Lane = tuple[Round, ...]


class Program(NamedTuple):
    """One rank's part of a schedule over a payload cut into `chunks` parts, as equal as they can be."""

    chunks: int
    lanes: tuple[Lane, ...]
    landing: int = 1
    """The most chunks that any rank is sent at once to be summed: by the ADDs of one round, whichever rank it is.

    All ranks say the same, since the length of the pieces depends on it.
    """
    columns: int = 1
    """Lanes come in so many groups of as many, one after another: each rank adds in the lanes of one group at most."""
    landing_far: int | None = None
    """As `landing`, of what comes from other nodes; None where the schedule does not tell them apart."""
    steady: bool = False
    """Whether each rank hears from the same one or two ranks of other nodes all along. All ranks say the same, too."""


def cuts_alike(program: Program) -> bool:
    """Return True where transfers name the same stretches of chunks, or stretches that have no chunk in common."""
    stretches = sorted({(t.chunk, t.chunk + t.span) for lane in program.lanes for transfers in lane for t in transfers})
    return all(stop <= start for (_, stop), (start, _) in pairwise(stretches))


Algorithm = Callable[[int, int], Program]
"""(rank, ranks) -> the program of that rank."""


class Family(NamedTuple):
    """What one algorithm offers: an allreduce, its two halves where they end at each rank's own chunk, and others."""

    allreduce: Algorithm
    part_reduce: Algorithm | None = None
    part_broadcast: Algorithm | None = None
    broadcast: Algorithm | None = None
    """From rank 0; for another root `renumber` it by a rotation."""
    all_to_all: Algorithm | None = None
    """2p chunks: chunk d < p goes to rank d, chunk p+s came from rank s, so the two ends of a transfer name different
    chunks. What a rank has for itself is not transferred: whoever plays the schedule copies chunk r to chunk p+r."""


def send(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Send what is held of the chunks to `peer`."""
    return Transfer(Action.SEND, peer, chunk, span)


def receive(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Replace the chunks by what `peer` sends."""
    return Transfer(Action.RECEIVE, peer, chunk, span)


def add(peer: int, chunk: int, span: int = 1) -> Transfer:
    """Sum what `peer` sends into the chunks."""
    return Transfer(Action.ADD, peer, chunk, span)
