"""Pace of a payload over the network: size of a piece, number of pieces under way, and polling interval of a rank.

    steady: always the same one or two    ▶ rank ▶      a connection does not flood itself: longer pieces, many at once
    others: from here, then from there   ▶▶▶ rank       together they can flood the switch: short pieces, few at once

Each piece costs a rank processor time, regardless of its size, and so does polling: time that the training lacks.
In the lab (8 hosts on 200 Mbit/s, 2 cores for all), halving with twice as many pieces at once took six times as long.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.network import Network
from unisono.schedules.schedule import Program

PIECE_SECONDS = 2.5e-3
"""Target for the seconds that a piece takes on a link: small pieces keep links busy between rounds."""

PIECES = 16 << 10, 512 << 10
"""Sizes of the smallest and the largest piece in bytes."""

UNMEASURED_PIECE = 256 << 10
"""Largest piece in bytes on an unmeasured network: longer ones keep slow links waiting; fast links lose little."""

TURNS = 64
"""Number of pieces that a long payload keeps when its pieces are made larger: the last one travels alone."""

AT_ONCE = 8, 16
"""Pieces under way at once in a schedule, and in a steady schedule."""

LANDING = 32 << 20
"""Bytes that a rank may receive at once to be reduced: all buffer memory of a collective."""

NAPS = 1e-4, 2e-3
"""Range of the longest sleep between polls in seconds; in a steady schedule, half the time of a chunk on a link."""


class Pace(NamedTuple):
    """Pace of a payload through a schedule."""

    largest: int
    """Number of elements of a piece's largest chunk."""
    at_once: int
    """Number of pieces under way at once."""
    nap: float
    """Largest number of seconds between two polls."""


def piece_of(network: Network) -> int:
    """Return the size of a piece in bytes: the bytes that a link carries in PIECE_SECONDS, within PIECES."""
    return max(PIECES[0], min(_largest(network), int(PIECE_SECONDS / network.beta)))


def _largest(network: Network) -> int:
    return PIECES[1] if network.measured else UNMEASURED_PIECE


def pace_of(
    program: Program,
    ranks: int,
    length: int,
    itemsize: int,
    network: Network,
    in_flight: float | None = None,
    by_node: bool = False,
) -> Pace:
    """Return the pace of `length` elements of `itemsize` bytes, or `in_flight` bytes when encoded, in a program.

    The pace is equal on all ranks of a schedule. `by_node`: data from the own node needs no landing buffer.
    """
    chunks = program.landing_far if by_node and program.landing_far is not None else program.landing
    lanes = max(1, len(program.lanes) // program.columns)
    piece, landing = piece_of(network), LANDING // (lanes * chunks * itemsize)
    if not program.steady:
        few = AT_ONCE[0]
        return Pace(min(piece // itemsize, landing // few), few, NAPS[0])
    flying, many = in_flight or itemsize, AT_ONCE[1]
    nbytes = int(length * flying)
    piece = min(_largest(network), max(piece, nbytes // (max(program.chunks, ranks) * TURNS)))
    on_the_way = min(piece, nbytes // program.chunks) * network.beta
    return Pace(min(int(piece / flying), landing // many), many, max(NAPS[0], min(NAPS[1], on_the_way / 2)))
