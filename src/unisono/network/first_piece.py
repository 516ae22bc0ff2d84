"""Simulation of very many ranks: the first piece flow by flow, what is left at the pace of the busiest link.

    piece 0  ├── every rank's rounds, on links that they share ──┤
    piece 1       ├── as much later as the busiest link needs ─────┤
    piece 2            ├── ...                                            at most `in_flight` at once

It is `estimate` with a simulated first piece in place of a chain. The programs of all ranks are made at once, by form,
so there are as many messages as in one piece, and few events: 40,960 ranks of halving take a second or two.

Worked example: 4 ranks of halving, 3 pieces. The first takes 4 s, of which its link is busy for 3 s. With 2 in flight
or more, the link decides: 4 + 2 * 3 = 10 s. One after another they take 12 s.

A payload of one piece has the result of `simulate`. With several, pieces also wait for each other on links: halving on
2 to 64 ranks with a slow link, in 130 random cases, was off by 2% in the median, by more than 17% in one of ten, and by
-20% to +35% at worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from unisono.network.critical_path import Cause, Delay
from unisono.network.links import Network
from unisono.network.play import MAX_EXACT_FLOWS, Play
from unisono.network.routes import Routes
from unisono.network.simulate import Simulated, summary
from unisono.network.traffic import ELEMENT_BYTES, Traffic, traffic
from unisono.network.uneven import EVEN, Uneven
from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm, Form

Forms = Callable[[int], list[Form]]


def simulate_first_piece(
    algorithm: Algorithm,
    forms: Forms,
    placement: Placement,
    network: Network,
    nbytes: int,
    piece_bytes: int,
    in_flight: int,
    eager: int,
    uneven: Uneven = EVEN,
) -> Simulated:
    """Simulate the first piece, whose chunks have `piece_bytes` bytes if there is more, and add the pace of the rest.

    Raises NetworkError above 20 million messages in a piece, and for ranks or nodes of `uneven` that do not exist.
    """
    whole = max(1, algorithm(0, placement.ranks).chunks * piece_bytes)
    slow, late = (tuple(sorted(some.items())) for some in (uneven.slow_nodes, uneven.late_ranks))
    first, delay = _first_piece(algorithm, forms, placement, network, min(nbytes, whole), eager, slow, late)
    more = nbytes / whole - 1
    if more <= 0:
        return first
    behind = max(more * delay.seconds, first.seconds * ((1 + more) / in_flight - 1))
    return replace(
        first,
        seconds=first.seconds + behind,
        messages=int(first.messages * (1 + more)),
        node_bytes=first.node_bytes * (1 + more),
        uplink_bytes=first.uplink_bytes * (1 + more),
        ends=tuple(end + behind for end in first.ends),
        delays=tuple(sorted((delay._replace(seconds=behind), *first.delays), key=lambda one: -one.seconds)),
    )


@lru_cache(maxsize=32)
def _first_piece(
    algorithm: Algorithm,
    forms: Forms,
    placement: Placement,
    network: Network,
    nbytes: int,
    eager: int,
    slow: tuple[tuple[int, float], ...],
    late: tuple[tuple[int, float], ...],
) -> tuple[Simulated, Delay]:
    """Return the result of one piece, and the seconds of the link that is busiest in it."""
    uneven = Uneven(dict(slow), dict(late))
    of_an_element = ELEMENT_BYTES * algorithm(0, placement.ranks).chunks
    if nbytes >= of_an_element:
        one, routes = _one_element(algorithm, forms, placement, network, slow)
        every = one.scaled(nbytes / of_an_element)
    else:  # some chunks have no element
        every = traffic(algorithm, placement.ranks, nbytes, max(1, nbytes), forms(placement.ranks))
        routes = Routes(every, placement, network, uneven)
    play = Play(every, routes, network, 1, eager, np.array(uneven.starts(placement)), MAX_EXACT_FLOWS)
    play.run()
    seconds = routes.seconds(every)
    busiest = int(seconds.argmax())
    return summary(play), Delay(Cause.PIECES, routes.name(busiest), float(seconds[busiest]))


@lru_cache(maxsize=1)
def _one_element(
    algorithm: Algorithm, forms: Forms, placement: Placement, network: Network, slow: tuple[tuple[int, float], ...]
) -> tuple[Traffic, Routes]:
    """Return the messages of a payload of one element a chunk, and their links: those of all larger payloads."""
    nbytes = ELEMENT_BYTES * algorithm(0, placement.ranks).chunks
    every = traffic(algorithm, placement.ranks, nbytes, nbytes, forms(placement.ranks))
    return every, Routes(every, placement, network, Uneven(dict(slow), {}))
