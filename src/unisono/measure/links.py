"""Measures the cost of a message, a byte and a sum, and finds the nodes that share a switch.

    alpha          half a ping-pong of 4 bytes, all pairs of nodes at once
    overhead       what each of many small messages at once adds
    pairs          random pairings of all nodes, each pair exchanging both ways  ── topology.py ──▶  supernodes
    beta           the same inside supernodes, with four times the bytes
    uplink_beta    all nodes of a supernode exchange with nodes of others, at once
    gamma          a block summed on every rank at once
    within         a block exchanged by the ranks of a node

One rank of each node exchanges with other nodes; the others wait. Each figure is a median over rounds and nodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.measure.topology import Pair, pairings, supernodes
from unisono.mpi import MPI
from unisono.network import Network
from unisono.transports.messages import wait
from unisono.world import World

REPETITIONS = 8
"""Repetitions of each measurement; each pair of nodes exchanges about half as often."""

MIN_EXCHANGE_SECONDS = 0.06
"""Least seconds of an exchange between a pair: its bytes are doubled until it takes so long, or up to MAX_BYTES."""

MAX_BYTES = 32 << 20

MESSAGE_BYTES = 128 << 10
"""Bytes of a message: schedules send pieces of this order, and one message of megabytes may be slower than they are."""

OVERHEAD_MESSAGES = 16
"""Messages in flight together, from which the overhead of one is computed."""

SUM_BLOCK_BYTES = 512 << 10
"""Bytes of a block in the measurement of sums."""

Bytes = NDArray[np.uint8]

MIN_UPLINK_RATIO = 1.15
"""Ratio of the times of crossing pairs to those inside a supernode from which an uplink counts as a limit."""


class Links(NamedTuple):
    """Measured network, the supernode of each node, and the speeds of pairs of nodes."""

    network: Network
    supernodes: tuple[int, ...]
    """Number of the supernode of each node."""
    speeds: tuple[tuple[Pair, float], ...] = ()
    """Bytes per second, in each direction, of every exchange of each pair of nodes."""


def measure_links(world: World, seconds: float | None = None) -> Links:
    """Measure the links between and within the nodes of `world`, in about `seconds` at most, but each pair of the first
    round at least. Called by all ranks, with the same result on each.
    """
    gamma, (within_alpha, within_beta) = _summing(world), _within(world)
    inside = Network(0, within_beta or gamma, gamma, None, within_alpha, within_beta)
    found = Links(inside, (0,) * world.nodes)
    leads = world.rank == world.placement.nodes[world.node][0]
    nodes: MPI.Intracomm = world.comm.Split(0 if leads else 1, world.node)  # type: ignore[assignment]  # one of each
    try:
        if leads and world.nodes > 1:
            found = _between(nodes, inside, seconds)
        world.barrier()
    finally:
        nodes.Free()
    links: Links = world.comm.bcast(found, 0)
    return links


def _between(nodes: MPI.Intracomm, inside: Network, seconds: float | None) -> Links:
    """Return the links between nodes; `nodes` has a rank of each node, `inside` the costs measured within nodes."""
    cycle = nodes.size - 1 + nodes.size % 2
    rounds = pairings(nodes.size, max(REPETITIONS, REPETITIONS // 2 * cycle) if nodes.size <= 64 else REPETITIONS * 8)
    alpha, overhead = _ping_pong(nodes, rounds[0]), _overhead(nodes, rounds[0])
    nbytes = 64 << 10
    while nbytes < MAX_BYTES and statistics.median(_exchange_seconds(nodes, rounds[0], nbytes)) < MIN_EXCHANGE_SECONDS:
        nbytes *= 2
    rounds = rounds[: _affordable(nodes, rounds[0], nbytes, seconds)]
    speeds = [
        (pair, nbytes / took)
        for pairs in rounds
        for pair, took in zip(pairs, _exchange_seconds(nodes, pairs, nbytes), strict=True)
    ]
    groups = supernodes(nodes.size, speeds)
    beta = statistics.median(_exchange_seconds(nodes, _inside(groups), 4 * nbytes, 3)) / (4 * nbytes)
    network = replace(inside, alpha=alpha, beta=beta, overhead=overhead)
    if crossing := _crossing(groups):
        slow = statistics.median(_exchange_seconds(nodes, crossing, 4 * nbytes, 3)) / (4 * nbytes)
        load = max(sum(group in (groups[a], groups[b]) for a, b in crossing) for group in set(groups))
        network = replace(network, uplink_beta=slow / load if slow > MIN_UPLINK_RATIO * beta else None)
    return Links(network, groups, tuple(speeds))


def _affordable(nodes: MPI.Intracomm, pairs: Sequence[Pair], nbytes: int, seconds: float | None) -> int | None:
    """Return the number of rounds that half of the `seconds` have time for, 1 or more; None for no limit."""
    if seconds is None:
        return None
    return max(1, int(seconds / 2 / max(_exchange_seconds(nodes, pairs, nbytes))))


def _inside(groups: Sequence[int]) -> list[Pair]:
    """Return pairs of nodes of one supernode, each node in at most one; (0, 1) where no supernode has two nodes."""
    pairs = [
        pair
        for group in sorted(set(groups))
        for members in [[node for node, number in enumerate(groups) if number == group]]
        for pair in zip(members[::2], members[1::2], strict=False)
    ]
    return pairs or [(0, 1)]


def _crossing(groups: Sequence[int]) -> list[Pair]:
    """Return pairs of nodes of different supernodes, each node in one at most: node i of one and of the next."""
    members = [[node for node, number in enumerate(groups) if number == group] for group in sorted(set(groups))]
    return [
        pair for one, other in zip(members[::2], members[1::2], strict=False) for pair in zip(one, other, strict=False)
    ]


def _exchange_seconds(nodes: MPI.Intracomm, pairs: Sequence[Pair], nbytes: int, times: int = 1) -> list[float]:
    """Return the seconds that each pair takes to exchange `nbytes` both ways, the median of `times` exchanges.

    All pairs exchange at the same time. Every rank gets the seconds of all pairs.
    """
    peer = _peer(nodes, pairs)
    there, back = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    took = []
    for _ in range(times):
        nodes.Barrier()
        start = time.perf_counter()
        if peer is not None:
            parts = [slice(begin, begin + MESSAGE_BYTES) for begin in range(0, nbytes, MESSAGE_BYTES)]
            _exchange(nodes, peer, [there[part] for part in parts], [back[part] for part in parts])
        took.append(time.perf_counter() - start)
    of_all_nodes = nodes.allgather(statistics.median(took))
    return [max(of_all_nodes[a], of_all_nodes[b]) for a, b in pairs]


def _exchange(nodes: MPI.Intracomm, peer: int, there: Sequence[Bytes], back: Sequence[Bytes]) -> None:
    """Send messages to a peer while it sends as many."""
    requests = [nodes.Irecv(part, peer) for part in back]
    for request in (*requests, *(nodes.Isend(part, peer) for part in there)):
        wait(request, _never_interrupted)


def _peer(nodes: MPI.Intracomm, pairs: Sequence[Pair]) -> int | None:
    """Return the node that is paired with this one; None where it is left out."""
    return next((sum(pair) - nodes.rank for pair in pairs if nodes.rank in pair), None)


def _ping_pong(nodes: MPI.Intracomm, pairs: Sequence[Pair]) -> float:
    """Return the seconds that 4 bytes take from one node to another while other pairs do the same."""
    peer, ball = _peer(nodes, pairs), np.zeros(4, np.uint8)
    nodes.Barrier()
    start = time.perf_counter()
    if peer is not None:
        for sends in 2 * REPETITIONS * [nodes.rank < peer, nodes.rank > peer]:
            wait(nodes.Isend(ball, peer) if sends else nodes.Irecv(ball, peer), _never_interrupted)
    took = (time.perf_counter() - start) / (4 * REPETITIONS)
    of_all_nodes: list[float] = nodes.allgather(took)
    return statistics.median(seconds for rank, seconds in enumerate(of_all_nodes) if rank in sum(pairs, ()))


def _overhead(nodes: MPI.Intracomm, pairs: Sequence[Pair]) -> float:
    """Return the seconds that a rank is busy with a small message, from the time of many beside one, both ways."""
    peer = _peer(nodes, pairs)
    took: dict[int, list[float]] = {1: [], OVERHEAD_MESSAGES: []}
    there, back = np.zeros((2, OVERHEAD_MESSAGES, 1024), np.uint8)
    for count in [1, OVERHEAD_MESSAGES] * REPETITIONS:
        messages = list(there[:count]), list(back[:count])
        nodes.Barrier()
        start = time.perf_counter()
        if peer is not None:
            _exchange(nodes, peer, *messages)
        took[count].append(time.perf_counter() - start)
    one, many = (statistics.median(took[count]) for count in (1, OVERHEAD_MESSAGES))
    of_all_nodes: list[float] = nodes.allgather(max(0.0, many - one) / (2 * (OVERHEAD_MESSAGES - 1)))
    return statistics.median(of_all_nodes)


def _summing(world: World) -> float:
    """Return the seconds to sum a byte while every rank does so."""
    total, part = np.zeros(SUM_BLOCK_BYTES // 4, np.float32), np.ones(SUM_BLOCK_BYTES // 4, np.float32)
    world.barrier()
    start = time.perf_counter()
    for _ in range(4 * REPETITIONS):
        np.add(total, part, total)
    return statistics.median(
        world.all_gather_object((time.perf_counter() - start) / (4 * REPETITIONS * SUM_BLOCK_BYTES))
    )


def _within(world: World) -> tuple[float, float]:
    """Return the seconds of a 4-byte allreduce within a node, and of a further byte; zeros with one rank a node."""
    node = world.node_world()
    seconds = []
    for nbytes in (4, 4 * SUM_BLOCK_BYTES):
        payload = torch.zeros(nbytes // 4)
        node.allreduce(payload)
        node.barrier()
        start = time.perf_counter()
        for _ in range(REPETITIONS):
            node.allreduce(payload)
        took = (time.perf_counter() - start) / REPETITIONS if node.size > 1 else None
        seconds.append([found for found in world.all_gather_object(took) if found is not None])
    if not seconds[0]:
        return 0.0, 0.0
    short, long = map(statistics.median, seconds)
    return short, max(0.0, long - short) / (4 * SUM_BLOCK_BYTES)


def _never_interrupted() -> None:
    """Do nothing: a measurement is not interrupted."""
