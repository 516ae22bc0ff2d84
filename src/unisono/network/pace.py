"""Pace of a payload over the network: size of a piece, number of pieces under way, and polling interval of a rank.

    steady: always the same one or two   ▶ rank ▶     one connection floods no switch: longer pieces, many at once
    others: changing senders           ▶▶▶ rank       together they can flood a switch: short pieces, few at once

Each piece costs a rank processor time, regardless of its size, and so does polling: time that the training needs.
In the lab (8 hosts on 200 Mbit/s, 2 cores for all), halving with twice as many pieces at once took six times as long.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.network import Network
from unisono.schedules.schedule import Program

PIECE_SECONDS = 2.5e-3
"""Target for the seconds that a piece takes on a link: small pieces keep links busy between rounds."""

PIECE_BYTES_RANGE = 16 << 10, 512 << 10
"""Sizes of the smallest and the largest piece in bytes."""

MAX_UNMEASURED_PIECE_BYTES = 256 << 10
"""Largest piece in bytes on an unmeasured network: longer ones keep slow links waiting; fast links lose little."""

MIN_UNMEASURED_PIECE_BYTES = 64 << 10
"""Smallest piece in bytes of a chunk that is cut in two on an unmeasured network: a chunk of one piece leaves the links
idle between rounds, while it is reduced."""

MIN_LONG_PIECES = 64
"""Number of pieces that a long payload keeps when its pieces are made larger: the last one travels alone."""

MIN_PIECES_PER_RANK = 8
"""Least number of pieces for each rank of a chain, through which the first piece passes rank by rank, as far as
PIECE_BYTES_RANGE allows: that costs an eighth of the time at most."""

MIN_PIECES_PER_ROUND = 24
"""Least number of pieces for each round of a schedule whose rounds follow each other, through which the first piece
passes round by round: that costs 4% of the time at most. None takes less time on a link than its latency."""

PIECES_IN_FLIGHT = 8, 16
"""Pieces under way at once in a schedule, and in a steady schedule."""

MAX_LANDING_BYTES = 32 << 20
"""Bytes that a rank may receive at once to be reduced: all buffer memory of a collective."""

SLEEP_SECONDS_RANGE = 1e-4, 2e-3
"""Range of the longest sleep between polls in seconds; in a steady schedule, half the time of a chunk on a link."""


class Pace(NamedTuple):
    """Pace of a payload through a schedule."""

    chunk_length: int
    """Number of elements of a piece's largest chunk."""
    in_flight: int
    """Number of pieces under way at once."""
    max_sleep_seconds: float
    """Largest number of seconds between two polls."""


def piece_bytes_of(network: Network) -> int:
    """Return the size of a piece in bytes: the bytes that a link carries in PIECE_SECONDS, within PIECE_BYTES_RANGE."""
    return max(PIECE_BYTES_RANGE[0], min(_max_piece_bytes(network), int(PIECE_SECONDS / network.beta)))


def _max_piece_bytes(network: Network) -> int:
    return PIECE_BYTES_RANGE[1] if network.measured else MAX_UNMEASURED_PIECE_BYTES


def pace_of(
    program: Program,
    ranks: int,
    length: int,
    itemsize: int,
    network: Network,
    wire_itemsize: float | None = None,
    by_node: bool = False,
) -> Pace:
    """Return the pace of `length` elements of `itemsize` bytes, or `wire_itemsize` bytes when encoded, in a program.

    The pace is equal on all ranks of a schedule. `by_node`: data from the own node needs no landing buffer.
    """
    chunks = program.landing_remote if by_node and program.landing_remote is not None else program.landing
    lanes = max(1, len(program.lanes) // program.columns)
    piece, landing = piece_bytes_of(network), MAX_LANDING_BYTES // (lanes * chunks * itemsize)
    if not program.steady:
        few, rounds = PIECES_IN_FLIGHT[0], 2 * (ranks - 1).bit_length()
        smallest = max(PIECE_BYTES_RANGE[0], int(network.alpha / network.beta))
        piece = min(piece, max(smallest, length * itemsize // (rounds * MIN_PIECES_PER_ROUND or 1)))
        return Pace(min(piece // itemsize, landing // few), few, SLEEP_SECONDS_RANGE[0])
    sent_itemsize, many = wire_itemsize or itemsize, PIECES_IN_FLIGHT[1]
    nbytes = int(length * sent_itemsize)
    piece = min(_max_piece_bytes(network), max(piece, nbytes // (max(program.chunks, ranks) * MIN_LONG_PIECES)))
    if not network.measured:
        piece = min(piece, max(MIN_UNMEASURED_PIECE_BYTES, nbytes // program.chunks // 2))
    if program.chunks == 1:
        piece = min(piece, max(PIECE_BYTES_RANGE[0], nbytes // (ranks * MIN_PIECES_PER_RANK)))
    link_seconds = min(piece, nbytes // program.chunks) * network.beta
    shortest, longest = SLEEP_SECONDS_RANGE
    sleep = max(shortest, min(longest, link_seconds / 2))
    return Pace(min(int(piece / sent_itemsize), landing // many), many, sleep)
