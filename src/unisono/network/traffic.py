"""All messages of a schedule as arrays: who sends in which round, who takes in which round, how many bytes.

    rank   0            1            2 ...
    lane   0     1      0     1
    round  0 1 2 3 4 5  6 7 ...              numbered through; a message is a pair of rounds: (sent in, taken in)

Programs are made one after another and forgotten: what stays are a few numbers for each message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.network.links import NetworkError
from unisono.network.price import spread
from unisono.schedules.pieces import Cut, cut
from unisono.schedules.schedule import Action, Algorithm, Program

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]

MOST = 20_000_000
"""More messages than this are refused: they would take gigabytes and minutes."""

ITEM = 4
"""Bytes of an element: payloads are cut at these."""


@dataclass(frozen=True)
class Traffic:
    """One piece's messages, in the order of the rounds that send them; every piece has the same."""

    ranks: int
    lanes: int
    pieces: int
    first_round: Numbers
    """For each rank and lane, the number of its first round; then, once more, the number of all rounds."""
    thread: Numbers
    """For each round: rank x lanes + lane."""
    sent_in: Numbers
    taken_in: Numbers
    """For each message: the rounds of its two ends."""
    nbytes: Seconds
    """For each message: its bytes."""
    added: Seconds
    """For each round: the bytes it sums into place."""

    @property
    def rounds(self) -> int:
        """How many there are."""
        return len(self.thread)

    @property
    def sender(self) -> Numbers:
        """For each message: the rank that sends it."""
        return self.thread[self.sent_in] // self.lanes

    @property
    def taker(self) -> Numbers:
        """For each message: the rank that takes it."""
        return self.thread[self.taken_in] // self.lanes


def traffic(algorithm: Algorithm, ranks: int, nbytes: int, piece_bytes: int) -> Traffic:
    """The messages of a payload of `nbytes` bytes in pieces whose chunks have at most `piece_bytes` bytes.

    Chunks without an element are left out, as in a play; the others have the same size, an even share of the payload.
    """
    whole = _cut_if_few(algorithm, ranks, nbytes, piece_bytes)
    ends = _ends(algorithm(rank, ranks) for rank in range(ranks))
    sends, takes = np.flatnonzero(ends.action == 0), np.flatnonzero(ends.action)
    nbytes_of = _sizes(whole, nbytes, ends.chunk, ends.span)
    first_round = np.concatenate([[0], np.cumsum(ends.turns)])
    thread = np.repeat(np.arange(len(ends.turns)), ends.turns)
    round_of = np.repeat(np.arange(len(thread)), ends.transfers)
    lane, rank = thread[round_of] % ends.lanes, thread[round_of] // ends.lanes
    sent = np.argsort((lane * ranks + rank)[sends] * ranks + ends.peer[sends], kind="stable")
    taken = np.argsort((lane * ranks + ends.peer)[takes] * ranks + rank[takes], kind="stable")
    if (
        len(sent) != len(taken)
        or (
            (ends.span[sends[sent]] != ends.span[takes[taken]])
            | (rank[sends[sent]] != ends.peer[takes[taken]])
            | (ends.peer[sends[sent]] != rank[takes[taken]])
        ).any()
    ):
        raise ScheduleError(
            f"{len(sends)} messages are sent on {ranks} ranks that are not those taken; `verify` says more"
        )
    taken_in = np.empty(len(sends), np.int64)
    taken_in[sent] = round_of[takes[taken]]
    some = nbytes_of[sends] > 0
    sums = takes[ends.action[takes] == 2]
    return Traffic(
        ranks=ranks,
        lanes=ends.lanes,
        pieces=whole.pieces,
        first_round=first_round,
        thread=thread,
        sent_in=round_of[sends][some],
        taken_in=taken_in[some],
        nbytes=nbytes_of[sends][some],
        added=np.bincount(round_of[sums], nbytes_of[sums], minlength=len(thread)).astype(np.float64),
    )


def _cut_if_few(algorithm: Algorithm, ranks: int, nbytes: int, piece_bytes: int) -> Cut:
    """The cut; refuses, from what a few ranks send, to make programs for hours."""
    if nbytes < 0 or piece_bytes < 1:
        raise NetworkError(f"{nbytes} bytes in pieces of {piece_bytes} cannot be cut")
    some = spread(ranks, 8)
    sends = 0
    for rank in some:
        program = algorithm(rank, ranks)
        sends += sum(transfer.action is Action.SEND for lane in program.lanes for turn in lane for transfer in turn)
    whole = cut(-(-nbytes // ITEM), program.chunks, piece_bytes // ITEM)
    messages = sends * ranks // len(some) * whole.pieces
    if messages > MOST:
        raise NetworkError(
            f"about {messages:,} messages of {ranks:,} ranks, in {whole.pieces:,} pieces, are too many to simulate: "
            f"at most {MOST:,} are. `price` and `estimate` look at some of the ranks; larger pieces make fewer messages"
        )
    return whole


def _sizes(whole: Cut, nbytes: int, chunk: Numbers, span: Numbers) -> Seconds:
    """Bytes of a transfer of one piece. Where there are fewer elements than chunks, some have none."""
    elements = whole.length // whole.pieces
    if elements >= whole.chunks:
        return span.astype(np.float64) * (nbytes / (whole.pieces * whole.chunks))
    counts = elements * (chunk + span) // whole.chunks - elements * chunk // whole.chunks
    return counts.astype(np.float64) * (nbytes / max(1, whole.length))


class _Ends(NamedTuple):
    """Both ends of every message, in the order of the programs."""

    lanes: int
    turns: Numbers
    """For each rank and lane: its rounds."""
    transfers: Numbers
    """For each round."""
    action: Numbers
    """0 a SEND, 1 a RECEIVE, 2 an ADD."""
    peer: Numbers
    chunk: Numbers
    span: Numbers


def _ends(programs: Iterable[Program]) -> _Ends:
    turns, transfers, action, peer, chunk, span = (array("i") for _ in range(6))
    lanes = 0
    for program in programs:
        if lanes and len(program.lanes) != lanes:
            raise ScheduleError(f"a rank has {len(program.lanes)} lanes where rank 0 has {lanes}")
        lanes = len(program.lanes)
        for lane in program.lanes:
            turns.append(len(lane))
            transfers.extend(map(len, lane))
            flat = list(chain.from_iterable(lane))
            action.extend([0 if t[0] is Action.SEND else 1 if t[0] is Action.RECEIVE else 2 for t in flat])
            peer.extend([t[1] for t in flat])
            chunk.extend([t[2] for t in flat])
            span.extend([t[3] for t in flat])
    columns = (np.array(column, np.int64) for column in (turns, transfers, action, peer, chunk, span))
    return _Ends(lanes, *columns)
