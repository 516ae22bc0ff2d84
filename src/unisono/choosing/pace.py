"""How a payload goes over the network: in pieces of what size, how many at once, and how often a rank looks.

    steady: always the same one or two    ▶ rank ▶      a connection does not flood itself: longer pieces, many at once
    others: from here, then from there   ▶▶▶ rank       together they can flood the switch: short pieces, few at once

A piece costs a rank the same whatever its size, and looking costs too: both are taken from the network's training.
In the lab (8 hosts on 200 Mbit/s, 2 cores for all), halving with twice as many pieces at once took six times as long.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.network import Network
from unisono.schedules.schedule import Program

PIECE_SECONDS = 2.5e-3
"""What a piece takes on a link: small ones keep links busy between rounds."""

PIECES = 16 << 10, 512 << 10
"""Bytes of the smallest and the largest piece."""

UNMEASURED_PIECE = 256 << 10
"""Bytes of the largest piece where nothing was measured: longer ones keep slow links waiting; fast ones lose little."""

TURNS = 64
"""A long payload's pieces may be larger, as long as there are so many: the last one goes alone."""

AT_ONCE = 8, 16
"""Pieces that go through a schedule at once, and where the schedule is steady."""

LANDING = 32 << 20
"""Bytes that may land at a rank at once, to be reduced: all the memory that an exchange takes."""

NAPS = 1e-4, 2e-3
"""Seconds that a rank sleeps between two looks at most: the longer for what takes twice as long on a link."""


class Pace(NamedTuple):
    """How a payload goes."""

    largest: int
    """Elements of a piece's largest chunk."""
    at_once: int
    """Pieces under way at once."""
    nap: float
    """Seconds between two looks, at most."""


def piece_of(network: Network) -> int:
    """Bytes of a piece by what a link carries in PIECE_SECONDS, within PIECES."""
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
    """The pace of `length` elements of `itemsize` bytes, or `in_flight` bytes on the way, through a program.

    The same for all ranks of a schedule. `by_node` says that what comes from the own node does not land.
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
