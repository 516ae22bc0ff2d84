"""Simulation of a collective on a network: messages are flows, and flows share links.

    rank    round begins ─┐          ┌─ round ends, received data is summed, the next begins
            both have: alpha, then ═════ bytes flow ═════
    links   sender's node ══ its supernode's uplink ══ the receiver's uplink ══ the receiver's node     (each one way)

The simulation plays a program as `transports/player.py` does: the payload is cut into pieces, and each piece goes
through every lane independently, at most `in_flight` at once. Time advances from one event to the next, and
simultaneous events are handled together. So a schedule in which all ranks do the same costs a few steps for any number
of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.network.critical_path import Delay, critical_path
from unisono.network.links import EVEN, Network, Uneven
from unisono.network.play import MAX_EXACT_FLOWS, Play
from unisono.network.routes import Routes
from unisono.network.traffic import traffic
from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation: the time, and the loads of the busiest links."""

    seconds: float
    messages: int
    node_bytes: float
    """Bytes over the busiest link of a node, in its busier direction."""
    uplink_bytes: float
    """Bytes over the busiest uplink of a supernode, in its busier direction."""
    steps: int
    """Number of events at different times."""
    resolution: float
    """Fraction of the elapsed time within which events counted as simultaneous: 1e-9, or 2e-3 at the end of a play of
    very many unsynchronized flows."""
    ends: tuple[float, ...]
    """Seconds after which each rank ends its last round; that of its start for a rank without rounds."""
    delays: tuple[Delay, ...]
    """Waits of the rank that ends last, longest first; together they last as long as the collective."""


def simulate(
    algorithm: Algorithm,
    placement: Placement,
    network: Network,
    nbytes: int,
    piece_bytes: int = 1 << 19,
    in_flight: int = 8,
    eager: int = 1 << 16,
    max_exact_flows: int = MAX_EXACT_FLOWS,
    uneven: Uneven = EVEN,
) -> Simulated:
    """Simulate the schedule on a payload of `nbytes` bytes in pieces whose chunks have at most `piece_bytes` bytes.

    A message flows once both ends have begun its round or, if it has at most `eager` bytes, once its sender has; its
    bytes follow alpha later. Between two ranks one message flows at a time, as on one connection, and all pairs that
    use a link have fair shares of it. Within a node, a message takes within_alpha, plus within_beta per byte,
    regardless of other messages. A round ends when its messages have arrived and then been summed, at gamma per byte
    and an overhead per message, independently of other rounds.

    `uneven` has nodes with slower links, and ranks that begin later than time 0. Ranks of one node begin independently.

    With very many unsynchronized flows, events are handled one by one until `max_exact_flows` flows were counted (some
    seconds of work). Then events within 0.2% of the elapsed time are handled together; the error is about 3%, along
    chains through hundreds of ranks (`pipeline`) up to 20%.

    Raises NetworkError, with the number of messages, above 20 million messages, and for ranks or nodes of `uneven` that
    do not exist.
    """
    every = traffic(algorithm, placement.ranks, nbytes, piece_bytes)
    routes = Routes(every, placement, network, uneven)
    play = Play(every, routes, network, in_flight, eager, np.array(uneven.starts(placement)), max_exact_flows)
    play.run()
    return Simulated(
        play.now,
        len(every.nbytes) * every.pieces,
        *routes.busiest(every),
        play.steps,
        play.resolution,
        tuple(play.ends().tolist()),
        critical_path(play),
    )
