"""The end of a round, the same on every transport: all that was added to a stretch is reduced in the order of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, Array, perform
from unisono.transports.player import Move


class OpenRound(NamedTuple):
    """A round that has begun: its moves, and for each what it has brought so far."""

    moves: Sequence[Move]
    arrivals: list[Array | None]


def reduce_arrivals(
    rank: int, payload: Array, arithmetic: Arithmetic, moves: Sequence[Move], arrivals: Iterable[Array | None]
) -> None:
    """Reduce what the ADDs of a round brought into `payload`, with the rank's own contribution in its place.

    `arrivals` has an entry for each move; those of other actions are not looked at.
    """
    contributions: dict[tuple[int, int], list[tuple[int, Array]]] = {}
    for move, arrived in zip(moves, arrivals, strict=True):
        if move.action is Action.ADD and arrived is not None:
            contributions.setdefault((move.where.start, move.where.stop), []).append((move.peer, arrived))
    for (start, stop), parts in contributions.items():
        own = payload[start:stop]
        ordered = sorted([*parts, (rank, own)], key=lambda part: part[0])
        perform(arithmetic.reduce([part for _, part in ordered], own))
