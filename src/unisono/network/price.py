"""Alpha-beta-gamma price of a schedule: the time of its most expensive rank, round by round.

    round      ├ alpha ┼──── bytes x beta of the slowest link ────┼ bytes summed x gamma ┤
    links          within the node │ the node's link │ the supernode's uplink

Source: the model of Thakur, Rabenseifner and Gropp, 2005, as swCaffe uses it in section 5.1, equations 2 to 6, where
beta_1 is `beta` and beta_2 is `crossing_beta` of a whole supernode: all its nodes cross at once in halving. Of a ring
one does, and shares the uplink with nobody (`sharing_beta`). A price follows from the schedule alone, without waits
between ranks. `estimate` adds these waits, `simulate` the sharing of links at each moment.

`bound` is the least time of a collective, whatever the schedule: that of the bytes that must pass the links between
nodes. n bytes, N nodes of k ranks, p = N k. Each chunk has to be combined from N nodes, given to N nodes, or both:

    collective       bytes over all links out of nodes     4 ranks on 4 nodes, per link
    allreduce        2 (N-1) n                             3/2 n
    reduce_scatter     (N-1) n                             3/4 n
    all_gather         (N-1) n                             3/4 n
    broadcast          (N-1) n                             3/4 n, and n into each node but the root's: n
    all_to_all       N k (p-k) n / p                       3/4 n

All links together carry these bytes at best: bytes / sum of the rates. And no link is faster than the bytes that its
own node must send or receive. The same holds for supernodes and their uplinks. Latency, sums and transfers within nodes
are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from unisono.network.links import EVEN, Amount, Network, NetworkError, Uneven
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program, Round

MAX_EXAMINED_RANKS = 256
"""Largest number of ranks that are examined by default."""

MAX_TRANSFERS = 500_000
"""Largest number of transfers of the ranks that are examined of long programs: about 2 s of work."""


class Load(NamedTuple):
    """Load of a round on links, in chunks of the schedule."""

    within_out: int = 0
    within_in: int = 0
    node_out: int = 0
    """Chunks over the node's link, to any supernode."""
    node_in: int = 0
    uplink_out: int = 0
    uplink_in: int = 0
    added: int = 0
    messages: int = 0
    """Number of messages sent and received, to and from any rank."""

    def with_(self, other: Load) -> Load:
        """Return the sum of both loads."""
        return Load(*map(int.__add__, self, other))


Lanes = tuple[tuple[Load, ...], ...]
"""Loads of one rank's rounds, by lane."""


def price(
    algorithm: Algorithm,
    placement: Placement,
    network: Network,
    nbytes: Amount,
    ranks: Iterable[int] | None = None,
) -> Amount:
    """Return the seconds for a payload of `nbytes` bytes that goes through the schedule in one piece.

    A round costs alpha once, because its messages travel together; then the time of the slowest link that the rank uses
    in it, each for the larger of the bytes out and in; then gamma per summed byte and the overhead per message. Ranks
    of one node in the same round share its link. A byte to another supernode shares the uplink with those of all nodes
    that cross as well, in any round.

    Lanes run side by side. A rank pays the alphas of its longest lane; then the link time of its longest lane or, if
    longer, that of all lanes together on its node's busiest link; and gamma for the sums of all lanes.

    Examines the given ranks; by default all of up to 256 ranks, else 256 evenly spread ranks, including the first and
    the last; they stand for the others where an uplink is shared. Other programs are made only for ranks on the same
    nodes. Nothing is rounded: with fractions in `network` and `nbytes` the price is exact. Raises NetworkError for
    ranks that do not exist.
    """
    examined = spread(placement.ranks) if ranks is None else sorted(set(ranks))
    if not examined or not 0 <= examined[0] <= examined[-1] < placement.ranks:
        raise NetworkError(f"ranks {examined[:4]} cannot be examined: there are {placement.ranks}")
    return most_expensive(lambda rank: algorithm(rank, placement.ranks), examined, placement, network, nbytes)


def most_expensive(
    program_of: Callable[[int], Program],
    examined: Sequence[int],
    placement: Placement,
    network: Network,
    nbytes: Amount,
    crossing: Amount | None = None,
) -> Amount:
    """Return the largest price among some ranks. A byte to another supernode takes `crossing` seconds; None: as long as
    these ranks share the uplinks."""

    @cache
    def of_rank(rank: int) -> tuple[int, Lanes]:
        program = program_of(rank)
        return program.chunks, loads(program, rank, placement)

    @cache
    def of_node(node: int) -> Lanes:
        return together([of_rank(rank)[1] for rank in placement.nodes[node]])

    if crossing is None:
        nodes = {placement.node_of(rank) for rank in examined} if placement.supernodes else ()
        crossing = sharing_beta({node: total(of_node(node)) for node in nodes}, placement, network)
    prices = []
    for rank in examined:
        chunks, own_lanes = of_rank(rank)
        mates = of_node(placement.node_of(rank))
        prices.append(_rank_price(own_lanes, mates, network, crossing, nbytes / chunks))
    return max(prices)


def spread(ranks: int, most: int = MAX_EXAMINED_RANKS) -> list[int]:
    """Return up to `most` evenly spread ranks, including the first and the last.

    >>> spread(100, 4)
    [0, 33, 66, 99]
    """
    return list(range(ranks)) if ranks <= most else [k * (ranks - 1) // (most - 1) for k in range(most)]


def examined_ranks(program: Program, placement: Placement, least: int) -> list[int]:
    """Return up to 256 evenly spread ranks, fewer the more transfers rank 0's program has: `least` at least."""
    transfers = count_transfers(program) * max(map(len, placement.nodes))
    return spread(placement.ranks, max(least, min(MAX_EXAMINED_RANKS, MAX_TRANSFERS // max(1, transfers))))


def count_transfers(program: Program) -> int:
    """Return the number of transfers of all rounds."""
    return sum(len(transfers) for lane in program.lanes for transfers in lane)


def sharing_beta(of_node: Mapping[int, Load], placement: Placement, network: Network) -> Amount:
    """Return the seconds per byte to another supernode while the nodes that use the busiest uplink share it.

    `of_node` has the total load of each node, or of a part of them. Where all nodes of a supernode cross alike, this is
    swCaffe's beta_2.
    """
    most = max((max(load.uplink_out, load.uplink_in) for load in of_node.values()), default=0)
    return network.crossing_beta(uplink_chunks(of_node, placement) / most if most else 0)


def uplink_chunks(of_node: Mapping[int, Load], placement: Placement) -> Fraction:
    """Return the chunks over the busiest uplink; for a part of the nodes, over one of equally busy uplinks."""
    if not placement.supernodes:
        return Fraction(0)
    out: defaultdict[int, int] = defaultdict(int)
    into: defaultdict[int, int] = defaultdict(int)
    for node, load in of_node.items():
        out[placement.supernodes[node]] += load.uplink_out
        into[placement.supernodes[node]] += load.uplink_in
    if len(of_node) == len(placement.nodes):
        return Fraction(max(*out.values(), *into.values()))
    examined = Fraction(len(of_node), len(placement.nodes)) * len(set(placement.supernodes))
    return max(sum(out.values()), sum(into.values())) / examined


def loads(program: Program, rank: int, placement: Placement) -> Lanes:
    """Return the loads of the rounds of one rank's program on links."""
    node, supernode = placement.node_of(rank), placement.supernode_of(rank)
    has_supernodes = bool(placement.supernodes)

    def load(transfers: Round) -> Load:
        return load_of(tuple([(action, peer, span) for action, peer, _, span in transfers]))

    @cache  # those of a ring are all alike
    def load_of(transfers: tuple[tuple[Action, int, int], ...]) -> Load:
        within_out = within_in = node_out = node_in = uplink_out = uplink_in = added = 0
        for action, peer, span in transfers:
            out, into = (span, 0) if action is Action.SEND else (0, span)
            if action is Action.ADD:
                added += span
            if placement.node_of(peer) == node:
                within_out, within_in = within_out + out, within_in + into
                continue
            node_out, node_in = node_out + out, node_in + into
            if has_supernodes and placement.supernode_of(peer) != supernode:
                uplink_out, uplink_in = uplink_out + out, uplink_in + into
        return Load(within_out, within_in, node_out, node_in, uplink_out, uplink_in, added, len(transfers))

    return tuple(tuple(map(load, lane)) for lane in program.lanes)


def together(ranks: Sequence[Lanes]) -> Lanes:
    """Return the summed loads of the ranks of one node, which share its link, round by round."""
    if len(ranks) == 1:
        return ranks[0]
    summed: list[list[Load]] = [[] for _ in range(max(map(len, ranks)))]
    for lanes in ranks:
        for so_far, lane in zip(summed, lanes, strict=False):
            so_far.extend([Load()] * (len(lane) - len(so_far)))
            so_far[: len(lane)] = map(Load.with_, so_far, lane)
    return tuple(map(tuple, summed))


def latency(load: Load, network: Network) -> Amount:
    """Return the alpha of a round in seconds."""
    if load.node_out or load.node_in:
        return network.alpha
    return network.within_alpha if load.within_out or load.within_in else 0


def link_seconds(load: Load, node: Load, network: Network, crossing: Amount, chunk: Amount) -> Amount:
    """Return the seconds of the slowest link that a rank uses; `node` is the load of all ranks of its node."""
    within = max(load.within_out, load.within_in) * network.within_beta
    if not (load.node_out or load.node_in):
        return within * chunk
    link = max(node.node_out, node.node_in) * network.beta
    return max(within, link, max(node.uplink_out, node.uplink_in) * crossing) * chunk


def total(lanes: Lanes) -> Load:
    """Return the total load of all rounds of all lanes."""
    return Load(*map(sum, zip(*(load for lane in lanes for load in lane), strict=True))) if any(lanes) else Load()


def _rank_price(own_lanes: Lanes, mates: Lanes, network: Network, crossing: Amount, chunk: Amount) -> Amount:
    alphas = max(sum(latency(load, network) for load in lane) for lane in own_lanes)
    lanes = [
        sum(link_seconds(load, node, network, crossing, chunk) for load, node in zip(lane, of_node, strict=False))
        for lane, of_node in zip(own_lanes, mates, strict=True)
    ]
    everything = total(own_lanes)
    busiest = link_seconds(everything, total(mates), network, crossing, chunk)
    work = everything.added * network.gamma * chunk + everything.messages * network.overhead
    return alphas + max(*lanes, busiest) + work


def bound(collective: str, placement: Placement, network: Network, nbytes: Amount, uneven: Uneven = EVEN) -> float:
    """Return the least seconds of a collective on `nbytes` bytes of each rank; 0 on a single node."""
    node_betas = [float(network.beta) * factor for factor in uneven.factors(placement)]
    least = _least(collective, list(map(len, placement.nodes)), node_betas, float(nbytes))
    if not (placement.supernodes and network.oversubscribed):
        return least
    ranks = [0] * len(set(placement.supernodes))
    for supernode, node in zip(placement.supernodes, placement.nodes, strict=True):
        ranks[supernode] += len(node)
    return max(least, _least(collective, ranks, [float(network.uplink_beta or 0)] * len(ranks), float(nbytes)))


def _least(collective: str, ranks: Sequence[int], betas: Sequence[float], nbytes: float) -> float:
    """Return the least seconds for groups of ranks, each with a link of `betas` seconds per byte."""
    if len(ranks) == 1:
        return 0.0
    everyone, rates = sum(ranks), sum(1 / beta for beta in betas)
    if collective == "all_to_all":
        shares = [count * (everyone - count) / everyone for count in ranks]
        return nbytes * max(beta * share for beta, share in zip(betas, shares, strict=True))
    if collective in ("reduce_scatter", "all_gather"):
        shares = [max(count, everyone - count) / everyone for count in ranks]
    else:
        shares = [1.0] * len(ranks)
    times = 2 if collective == "allreduce" else 1
    together = times * (len(ranks) - 1) / rates
    return nbytes * max(together, *(beta * share for beta, share in zip(betas, shares, strict=True)))
