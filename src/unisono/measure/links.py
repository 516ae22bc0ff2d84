"""Measures the cost of a message, a byte and a sum, and finds the nodes that share a switch.

    alpha          half a ping-pong of 4 bytes, all pairs of nodes at once
    overhead       what each of many small messages at once adds
    pairs          random pairings of all nodes, each pair exchanging both ways  ──▶  supernodes
    beta           the same inside supernodes, with four times the bytes
    uplink_beta    all nodes of a supernode exchange with nodes of others, at once
    gamma          a block summed on every rank at once
    within         a block exchanged by the ranks of a node

One rank of each node exchanges with other nodes; the others wait. Each figure is a median over rounds and nodes. Where
collectives go through sockets, between nodes of one rank, these exchanges do: messages of MPI, which Python plays, take
up to 1.7 times as long on 10 Gbit/s. So do payloads in a wire there, which are such messages all the same.

Nodes that share a switch are found from the speed of pairs of nodes while all others are busy too. A pair alone may be
as fast through an uplink as inside a supernode; an uplink shows only under load. So in each round all nodes are paired
anew, and all pairs exchange at once:

    round 0   0-5  1-3  2-7  4-6      pairs that cross share the uplinks and are slow: 0-5, 2-7
    round 1   0-2  1-6  3-4  5-7                                                       1-6, 3-4
    ...                               a pair that was often slow sits in two supernodes

Uplinks over-subscribed by less than three may go unnoticed: only half of the pairs cross, a load that they can carry.
"""

from __future__ import annotations

import random
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.mpi import MPI
from unisono.network import Network
from unisono.transports.messages import wait
from unisono.transports.sockets import MAX_SEGMENTS
from unisono.transports.steps import BYTES, Row, RowKind
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

SMALL_BYTES = 2048
"""Bytes of one of these: more than a socket's reader takes together with the next."""

SUM_BLOCK_BYTES = 512 << 10
"""Bytes of a block in the measurement of sums."""

Bytes = NDArray[np.uint8]

Prepare = Callable[[int, Bytes, Bytes, int], Callable[[], None]]
"""Function of a peer, what is sent to it, what is received, and the bytes of a message; it returns the exchange."""


class NodeMessages(NamedTuple):
    """Messages between nodes."""

    nodes: MPI.Intracomm
    """One rank of each node."""
    prepare: Prepare
    barrier: Callable[[], None]
    """Barrier of these ranks that leaves no message under way."""


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
    local = Links(inside, (0,) * world.nodes)
    leads = world.rank == world.placement.nodes[world.node][0]
    nodes: MPI.Intracomm = world.comm.Split(0 if leads else 1, world.node)  # type: ignore[assignment]  # one of each
    try:
        messages = _messages_of(world, nodes)
        if leads and world.nodes > 1:
            local = _between(messages, inside, seconds)
        world.barrier()
    finally:
        nodes.Free()
    links: Links = world.comm.bcast(local, 0)
    return links


def _messages_of(world: World, nodes: MPI.Intracomm) -> NodeMessages:
    """Return how two nodes exchange messages: through the sockets of collectives, or by MPI."""

    def by_messages(peer: int, sent: Bytes, received: Bytes, length: int) -> Callable[[], None]:
        leaving, arriving = _messages(sent, length), _messages(received, length)

        def exchange() -> None:
            requests = [nodes.Irecv(part, peer) for part in arriving]
            for request in (*requests, *(nodes.Isend(part, peer) for part in leaving)):
                wait(request, lambda: None)

        return exchange

    sockets = world.sockets() if world.size == world.nodes else None
    if sockets is None:
        return NodeMessages(nodes, by_messages, nodes.Barrier)

    def late() -> None:
        nodes.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # others may need MPI's progress

    def by_sockets(peer: int, sent: Bytes, received: Bytes, length: int) -> Callable[[], None]:
        (rank,) = world.placement.nodes[peer]
        length = max(length, -(-max(sent.size, received.size) // MAX_SEGMENTS))
        alone = [Row(RowKind.ROUND)] if length <= SMALL_BYTES else []  # else they would leave in one call
        rows = list[Row]()
        for part in _messages(sent, length):
            rows += [Row(RowKind.SEND, part.size, 0, part.ctypes.data, rank), *alone]
        rows += [Row(RowKind.RECEIVE, part.size, part.ctypes.data, 0, rank) for part in _messages(received, length)]
        play = sockets.player_of([*rows, Row(RowKind.ROUND)], BYTES, late, _never_mismatched)

        def exchange(_: object = (sent, received)) -> None:  # whose addresses it has
            play(0, 0, 0)

        return exchange

    return NodeMessages(nodes, by_sockets, world.barrier)


def _messages(memory: Bytes, length: int) -> list[Bytes]:
    return [memory[begin : begin + length] for begin in range(0, memory.size, length)]


def _between(messages: NodeMessages, inside: Network, seconds: float | None) -> Links:
    """Return the links between nodes; `inside` has the costs measured within nodes."""
    nodes, exchange_seconds = messages.nodes, partial(_exchange_seconds, messages)
    cycle = nodes.size - 1 + nodes.size % 2
    rounds = pairings(nodes.size, max(REPETITIONS, REPETITIONS // 2 * cycle) if nodes.size <= 64 else REPETITIONS * 8)
    alpha, overhead = _ping_pong(messages, rounds[0]), _overhead(messages, rounds[0])
    nbytes = 64 << 10
    while nbytes < MAX_BYTES and statistics.median(exchange_seconds(rounds[0], nbytes)) < MIN_EXCHANGE_SECONDS:
        nbytes *= 2
    if seconds is not None:  # half of them, but one round at least
        rounds = rounds[: max(1, int(seconds / 2 / max(exchange_seconds(rounds[0], nbytes))))]
    speeds = [
        (pair, nbytes / took)
        for pairs in rounds
        for pair, took in zip(pairs, exchange_seconds(pairs, nbytes), strict=True)
    ]
    groups = supernodes(nodes.size, speeds)
    members = [[node for node, owner in enumerate(groups) if owner == group] for group in sorted(set(groups))]
    # pairs of one supernode, and of different ones, with each node in one at most; (0, 1) where no supernode has two
    within = [pair for some in members for pair in zip(some[::2], some[1::2], strict=False)] or [(0, 1)]
    beta = statistics.median(exchange_seconds(within, 4 * nbytes, 3)) / (4 * nbytes)
    network = replace(inside, alpha=alpha, beta=beta, overhead=overhead)
    neighbours = zip(members[::2], members[1::2], strict=False)  # node i of one supernode and of the next
    if crossing := [pair for even, odd in neighbours for pair in zip(even, odd, strict=False)]:
        slow = statistics.median(exchange_seconds(crossing, 4 * nbytes, 3)) / (4 * nbytes)
        load = max(sum(group in (groups[a], groups[b]) for a, b in crossing) for group in set(groups))
        network = replace(network, uplink_beta=slow / load if slow > MIN_UPLINK_RATIO * beta else None)
    return Links(network, groups, tuple(speeds))


def _exchange_seconds(messages: NodeMessages, pairs: Sequence[Pair], nbytes: int, times: int = 1) -> list[float]:
    """Return the seconds that each pair takes to exchange `nbytes` both ways, the median of `times` exchanges.

    All pairs exchange at the same time. Every rank gets the seconds of all pairs.
    """
    memory = np.zeros((2, nbytes), np.uint8)
    took = _seconds(messages, pairs, memory, MESSAGE_BYTES, times)
    of_all_nodes = messages.nodes.allgather(statistics.median(took))
    return [max(of_all_nodes[a], of_all_nodes[b]) for a, b in pairs]


def _seconds(messages: NodeMessages, pairs: Sequence[Pair], memory: Bytes, length: int, times: int = 1) -> list[float]:
    """Return this node's seconds of each exchange with its peer; rows of `memory` are what is sent and received."""
    peer, took = _peer(messages.nodes, pairs), list[float]()
    sent, received = memory
    exchange = None if peer is None else messages.prepare(peer, sent, received, length)
    for _ in range(times):
        messages.barrier()
        start = time.perf_counter()
        if exchange is not None:
            exchange()
        took.append(time.perf_counter() - start)
    return took


def _peer(nodes: MPI.Intracomm, pairs: Sequence[Pair]) -> int | None:
    """Return the node that is paired with this one; None where it is left out."""
    return next((sum(pair) - nodes.rank for pair in pairs if nodes.rank in pair), None)


def _ping_pong(messages: NodeMessages, pairs: Sequence[Pair]) -> float:
    """Return the seconds that 4 bytes take from one node to another while other pairs do the same."""
    peer, (ball, nothing) = _peer(messages.nodes, pairs), (np.zeros(4, np.uint8), np.zeros(0, np.uint8))
    moves = [] if peer is None else [messages.prepare(peer, ball, nothing, 4), messages.prepare(peer, nothing, ball, 4)]
    messages.barrier()
    start = time.perf_counter()
    for exchange in 2 * REPETITIONS * (moves if messages.nodes.rank < (peer or 0) else moves[::-1]):
        exchange()
    took = (time.perf_counter() - start) / (4 * REPETITIONS)
    of_all_nodes: list[float] = messages.nodes.allgather(took)
    return statistics.median(seconds for rank, seconds in enumerate(of_all_nodes) if rank in sum(pairs, ()))


def _overhead(messages: NodeMessages, pairs: Sequence[Pair]) -> float:
    """Return the seconds that a rank is busy with a small message, from the time of many beside one, both ways."""
    took: dict[int, list[float]] = {1: [], OVERHEAD_MESSAGES: []}
    memory = np.zeros((2, OVERHEAD_MESSAGES * SMALL_BYTES), np.uint8)
    for count in [1, OVERHEAD_MESSAGES] * REPETITIONS:
        took[count] += _seconds(messages, pairs, memory[:, : count * SMALL_BYTES], SMALL_BYTES)
    single, many = (statistics.median(took[count]) for count in (1, OVERHEAD_MESSAGES))
    of_all_nodes: list[float] = messages.nodes.allgather(max(0.0, many - single) / (2 * (OVERHEAD_MESSAGES - 1)))
    return statistics.median(of_all_nodes)


def _summing(world: World) -> float:
    """Return the seconds to sum a byte while every rank does so."""
    total, part = np.zeros(SUM_BLOCK_BYTES // 4, np.float32), np.ones(SUM_BLOCK_BYTES // 4, np.float32)
    took = timeit.timeit(lambda: np.add(total, part, total), world.barrier, number=4 * REPETITIONS)
    return statistics.median(world.all_gather_object(took / (4 * REPETITIONS * SUM_BLOCK_BYTES)))


def _within(world: World) -> tuple[float, float]:
    """Return the seconds of a 4-byte allreduce within a node, and of a further byte; zeros with one rank a node."""
    node = world.node_world()
    seconds = []
    for nbytes in (4, 4 * SUM_BLOCK_BYTES):
        payload = torch.zeros(nbytes // 4)
        node.allreduce(payload)
        took = timeit.timeit(partial(node.allreduce, payload), node.barrier, number=REPETITIONS) / REPETITIONS
        seconds.append([each for each in world.all_gather_object(took if node.size > 1 else None) if each is not None])
    if not seconds[0]:
        return 0.0, 0.0
    short, long = map(statistics.median, seconds)
    return short, max(0.0, long - short) / (4 * SUM_BLOCK_BYTES)


def _never_mismatched(rank: int) -> None:
    raise AssertionError(f"rank {rank} measures something else")


Pair = tuple[int, int]

SLOW_FRACTION = 0.75
"""Fraction of the speed inside a supernode below which a pair counts as slow."""

SLOW_LINK_RATIO = 1.5
"""Ratio of the median speed of nodes to that of a node from which its link counts as slow."""

MAX_SLOW_SHARE = 0.2
"""Largest share of slow exchanges of pairs inside one supernode."""


def pairings(nodes: int, rounds: int, seed: int = 0) -> list[list[Pair]]:
    """Return `rounds` random pairings of `nodes` nodes, the same for the same seed; an odd number leaves one node out.

    In every `nodes - 1` rounds (one more where `nodes` is odd) each two nodes are paired once, in a new random order.
    """
    rng = random.Random(seed)
    paired: list[list[Pair]] = []
    while len(paired) < rounds and nodes > 1:
        order: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
        rng.shuffle(order)
        for _ in range(len(order) - 1):  # the circle method: one stays, the others go round
            half = len(order) // 2
            exchanges = zip(order[:half], reversed(order[half:]), strict=True)
            paired.append([(min(a, b), max(a, b)) for a, b in exchanges if a is not None and b is not None])
            order = [order[0], order[-1], *order[1:-1]]
    return paired[:rounds]


def supernodes(nodes: int, speeds: Iterable[tuple[Pair, float]]) -> tuple[int, ...]:
    """Return the number of each node's supernode, given the speed (any unit) of each exchange of each pair.

    Supernodes are numbered in the order of their lowest node; there is one where no pairs stand out as slow. Average
    linkage over the share of slow exchanges; costs O(nodes^3) in NumPy.
    """
    exchanges, slow = np.zeros((2, nodes, nodes))  # of each pair, symmetric
    by_pair = _by_pair(speeds)
    medians = sorted(map(statistics.median_high, by_pair.values()), reverse=True)
    # the speed inside a supernode is that of the fastest pairs, enough of them to hold each node once or more
    full = medians[min(len(medians) - 1, nodes // 4)] if medians else 0.0
    for (a, b), seen in by_pair.items():
        for index in ((a, b), (b, a)):
            exchanges[index] += len(seen)
            slow[index] += sum(speed < SLOW_FRACTION * full for speed in seen)
    alive = list(range(nodes))
    groups = {node: [node] for node in alive}  # by the lowest of each
    while len(alive) > 1:  # the surest are joined first, as long as the pairs between two groups were rarely slow
        share = np.where(exchanges > 0, slow / np.maximum(exchanges, 1), 1.0)[np.ix_(alive, alive)]
        np.fill_diagonal(share, np.inf)
        kept, merged = sorted(alive[index] for index in np.unravel_index(np.argmin(share), share.shape))
        if share.min() >= MAX_SLOW_SHARE:
            break
        for matrix in (exchanges, slow):
            matrix[kept] += matrix[merged]
            matrix[:, kept] += matrix[:, merged]
        groups[kept] += groups.pop(merged)
        alive.remove(merged)
    numbers = {node: number for number, lowest in enumerate(sorted(groups)) for node in groups[lowest]}
    return tuple(numbers[node] for node in range(nodes))


def _by_pair(speeds: Iterable[tuple[Pair, float]]) -> dict[Pair, list[float]]:
    by_pair: dict[Pair, list[float]] = {}
    for pair, speed in speeds:
        by_pair.setdefault(pair, []).append(speed)
    return by_pair


def slow_links(nodes: int, speeds: Iterable[tuple[Pair, float]]) -> dict[int, float]:
    """Return, for each node whose link is slow, how many times it is slower, given the speed of each exchange of pairs.

    A node's own speed is that of its fastest pair, by the median of the pair's exchanges: behind a narrow uplink the
    pairs inside its supernode are still fast, but no pair of a slow link is. It is slow from SLOW_LINK_RATIO times
    below the median of all nodes on. With two nodes, both have the same pair, and none is slow.

    Worked example: pairs 0-1, 0-2 and 1-2 at 100 MB/s, those of node 3 at 25: fastest 100, 100, 100, 25; {3: 4.0}.
    """
    medians = {pair: statistics.median(seen) for pair, seen in _by_pair(speeds).items()}
    fastest = {
        node: max(speed for pair, speed in medians.items() if node in pair)
        for node in range(nodes)
        if any(node in pair for pair in medians)
    }
    if not fastest:
        return {}
    typical = statistics.median(fastest.values())
    return {node: typical / speed for node, speed in fastest.items() if typical >= SLOW_LINK_RATIO * speed}
