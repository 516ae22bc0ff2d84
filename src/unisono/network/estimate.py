"""Cheap estimate of the time of a collective in many pieces: the time of the first piece, then the busiest link.

    piece 0  ├──── chain of waiting ranks ───────┤
    piece 1       ├─ the busiest link takes one piece after another ─ ...        at most `in_flight` at once
    piece 2            ├─ ...

In the first piece, each round waits for the rounds of its partners:

    rank 3   ── round 0 ──┐
    rank 2   ── round 0 ──┴─ round 1 ──┐          tree, 4 ranks: the last round ends after 4 rounds, one after another,
    rank 0   ── round 0 ───────────────┴─ round 1 ──          though no rank but 2 has as many

It chooses a schedule when nothing has been measured. `price` models one rank, `simulate` models all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from unisono.network.links import EVEN, Amount, Network, Uneven
from unisono.network.price import (
    MAX_EXAMINED_RANKS,
    Load,
    count_transfers,
    examined_ranks,
    latency,
    link_seconds,
    loads,
    most_expensive,
    sharing_beta,
    spread,
    total,
    uplink_chunks,
)
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program

PIECE_BYTES, IN_FLIGHT = 1 << 19, 8

MIN_EXAMINED_RANKS = 2

MAX_CHAINS = 32
"""Number of ranks whose chains of waits are followed above 256 ranks."""


def estimate(
    algorithm: Algorithm, placement: Placement, network: Network, nbytes: Amount, uneven: Uneven = EVEN
) -> Amount:
    """Return the seconds for a payload of `nbytes` bytes in pieces whose chunks have at most PIECE_BYTES bytes.

    The first piece takes as long as its longest chain of rounds, each waiting for its partners'. The others follow at
    the pace of the busiest link (a node's, a supernode's uplink) or rank (its sums), at most IN_FLIGHT at once.
    Uplinks and nodes' links are charged for the ranks that use them: a ring, where few do, costs less than its
    `price`. If all ranks do the same, the result is within a few percent of `simulate`. If they use a link in turn
    (`multicolor` and `pipeline` with several ranks per node), it is up to twice as long. Of `uneven`, the slow links
    of nodes count.

    Above 256 ranks, only the nodes of 256 ranks (of long programs, fewer) and those with slow links are examined. The
    chain goes through some ranks and those from which their results come (`with_sources`). All supernodes are assumed
    to be equally busy.
    """
    slow = {node: times for node, times in enumerate(uneven.factors(placement)) if times > 1}
    few, examined = placement.ranks <= MAX_EXAMINED_RANKS, list(range(placement.ranks))
    if not few:  # the fewer, the more transfers a program has
        examined = examined_ranks(algorithm(0, placement.ranks), placement, MIN_EXAMINED_RANKS)
    nodes = sorted({placement.node_of(rank) for rank in examined} | set(slow))
    programs = {rank: algorithm(rank, placement.ranks) for node in nodes for rank in placement.nodes[node]}
    chunks = programs[placement.nodes[0][0]].chunks
    pieces = max(1, int(-(-nbytes // (chunks * PIECE_BYTES))))
    chunk = nbytes / (pieces * chunks)
    busy, crossing, mates = _busy(programs, placement, network, chunk, slow)
    shared = replace(network, beta=network.beta * mates)
    followed = programs if few else with_sources(_ends(placement, slow), algorithm, placement.ranks)
    chain = chain_seconds(followed, placement, shared, chunk, crossing * mates, slow)
    if not few:
        groups = [(network, [rank for rank in programs if placement.node_of(rank) not in slow])]
        groups += [(slowed(network, times), [*placement.nodes[node]]) for node, times in slow.items()]
        for links, ranks in groups:
            if ranks:
                largest = most_expensive(programs.__getitem__, ranks, placement, links, nbytes / pieces, crossing)
                chain = max(chain, largest)
    pace = max(busy, chain / min(IN_FLIGHT, pieces))
    return max(chain, busy) + (pieces - 1) * pace


def _ends(placement: Placement, slow: Mapping[int, float]) -> list[int]:
    """Return the ranks whose chains are followed: spread ones, the deepest of a binomial tree, and slow ones."""
    deepest = ((1 << bits) - 1 for bits in range(placement.ranks.bit_length()))
    return [*spread(placement.ranks, MAX_CHAINS), *deepest, *(rank for node in slow for rank in placement.nodes[node])]


def least_cost(algorithm: Algorithm, placement: Placement, network: Network) -> Callable[[Amount], Amount]:
    """Return the function of a payload's bytes that gives the seconds below which no estimate is: rank 0's rounds of a
    lane one after another, each with its alpha and its bytes on its own link."""
    program = algorithm(0, placement.ranks)
    lanes = []
    for lane in loads(program, 0, placement):
        chunks = max(sum(load.node_out for load in lane), sum(load.node_in for load in lane))
        lanes.append((sum(latency(load, network) for load in lane), chunks * network.beta / program.chunks))
    return lambda nbytes: max(latencies + nbytes * per_byte for latencies, per_byte in lanes)


def _busy(
    programs: Mapping[int, Program], placement: Placement, network: Network, chunk: Amount, slow: Mapping[int, float]
) -> tuple[Amount, Amount, Fraction]:
    """Return the seconds for which one piece occupies links and ranks, those per byte to another supernode while the
    ranks that use the uplink share it, and the number of ranks of a node that share its link."""
    of_rank = {rank: total(loads(program, rank, placement)) for rank, program in programs.items()}
    of_node: defaultdict[int, Load] = defaultdict(Load)
    for rank, load in of_rank.items():
        of_node[placement.node_of(rank)] = of_node[placement.node_of(rank)].with_(load)
    link = max(max(load.node_out, load.node_in) for load in of_node.values())
    uplink, crossing = uplink_chunks(of_node, placement), sharing_beta(of_node, placement, network)
    seconds_a_byte = (
        max(max(load.node_out, load.node_in) * slow.get(node, 1) for node, load in of_node.items()) * network.beta,
        uplink * (network.uplink_beta or 0),
        max(load.added for load in of_rank.values()) * network.gamma,
        max(max(load.within_out, load.within_in) for load in of_rank.values()) * network.within_beta,
    )
    alone = max(max(load.node_out, load.node_in) for load in of_rank.values())
    message_seconds = max(load.messages for load in of_rank.values()) * network.overhead
    seconds = max(max(seconds_a_byte) * chunk, message_seconds)
    return seconds, crossing, Fraction(link, alone or 1) if link else Fraction(1)


MAX_CHAINED_TRANSFERS = 200_000
"""Largest number of transfers of all ranks on these chains: a second of work."""


def with_sources(ends: Iterable[int], algorithm: Algorithm, ranks: int) -> Mapping[int, Program]:
    """Return the programs of some ranks and of those from which their results come: in each lane the sender of the last
    chunks that a rank receives, the one from which that rank received its own, and so on.

    In a tree these are all ranks on the way from the root. Returns no program if there were too many transfers.

        tree, 8 ranks, results of ranks 3 and 7         3 ◀─ 2 ◀─ 0        7 ◀─ 6 ◀─ 4 ◀─ 0
    """
    programs: dict[int, Program] = {}
    left, lanes = MAX_CHAINED_TRANSFERS, len(algorithm(0, ranks).lanes)
    waiting = deque((rank, lane) for rank in dict.fromkeys(ends) for lane in range(lanes))
    seen = set(waiting)
    while waiting and left > 0:
        rank, lane = waiting.popleft()
        if rank not in programs:
            programs[rank] = algorithm(rank, ranks)
            left -= count_transfers(programs[rank])
        rounds = reversed(programs[rank].lanes[lane])
        received = (t.peer for transfers in rounds for t in transfers if t.action is Action.RECEIVE)
        source = next(received, rank), lane
        if source not in seen:
            seen.add(source)
            waiting.append(source)
    return programs if left > 0 else {}


def slowed(network: Network, times: float) -> Network:
    """Return the network as a node with a slower link sees it."""
    return replace(network, beta=network.beta * times) if times > 1 else network


def chain_seconds(
    programs: Mapping[int, Program],
    placement: Placement,
    network: Network,
    chunk: Amount,
    crossing: Amount,
    slow: Mapping[int, float],
) -> Amount:
    """Return the end of the last round of one piece, if a round starts once it and its partners' rounds have begun.

    It then lasts as long as the slowest of them takes alone; `slow` has the factors of nodes with slower links. A round
    that never begins is left to `verify`.
    """
    rounds: list[_Round] = []
    sent: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, program in programs.items():
        links = slowed(network, slow.get(placement.node_of(rank), 1))
        for lane, (lane_rounds, lane_loads) in enumerate(
            zip(program.lanes, loads(program, rank, placement), strict=True)
        ):
            for position, (transfers, load) in enumerate(zip(lane_rounds, lane_loads, strict=True), 1):
                for action, peer, _, _ in transfers:
                    ends = sent[rank, peer, lane] if action is Action.SEND else received[peer, rank, lane]
                    ends.append(len(rounds))
                passing = latency(load, network) + link_seconds(load, load, links, crossing, chunk)
                summing = load.added * network.gamma * chunk + load.messages * network.overhead
                rounds.append(_Round(passing, summing, position == 1, position == len(lane_rounds)))
    partners: list[list[int]] = [[] for _ in rounds]
    for between, senders in sent.items():
        for sending, receiving in zip(senders, received[between], strict=False):
            partners[sending].append(receiving)
            partners[receiving].append(sending)
    return _last_end(rounds, partners)


class _Round(NamedTuple):
    passing: Amount
    """Seconds for its messages alone."""
    summing: Amount
    first: bool
    """True for the first round of its lane."""
    last: bool


def _last_end(rounds: Sequence[_Round], partners: Sequence[Sequence[int]]) -> Amount:
    latest: Amount = 0
    began: dict[int, Amount] = {index: 0 for index, member in enumerate(rounds) if member.first}
    awaiting = [1 + len(met) for met in partners]
    just_begun = deque(began)
    while just_begun:
        starting = just_begun.popleft()
        for index in (starting, *partners[starting]):
            awaiting[index] -= 1
            if awaiting[index]:
                continue
            involved = (index, *partners[index])
            end = max(began[member] for member in involved) + max(rounds[member].passing for member in involved)
            end += rounds[index].summing
            latest = max(latest, end)
            if not rounds[index].last:
                began[index + 1] = end
                just_begun.append(index + 1)
    return latest
