"""Cheap estimate of the time of a collective in many pieces: the time of the first piece, then the busiest link.

    piece 0  ├──── chain of waiting ranks ───────┤
    piece 1       ├─ the busiest link takes one piece after another ─ ...        at most `in_flight` at once
    piece 2            ├─ ...

It chooses a schedule when nothing has been measured. `price` models one rank, `simulate` models all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from unisono.network.links import Amount, Network
from unisono.network.price import MAX_EXAMINED_RANKS, Load, latency, link_seconds, loads, most_expensive, spread, total
from unisono.placement import Placement
from unisono.schedules.schedule import Action, Algorithm, Program


class _Busy(NamedTuple):
    """Time for which one piece occupies links and ranks."""

    seconds: Amount
    crossing: Amount
    """Seconds per byte to another supernode while the ranks that use the uplink share it."""
    mates: Fraction
    """Number of ranks of a node that share its link."""


def estimate(
    algorithm: Algorithm,
    placement: Placement,
    network: Network,
    nbytes: Amount,
    piece_bytes: int = 1 << 19,
    in_flight: int = 8,
) -> Amount:
    """Return the seconds for a payload of `nbytes` bytes in pieces whose chunks have at most `piece_bytes` bytes.

    The first piece takes as long as its longest chain of rounds, each waiting for its partners'. The others follow at
    the pace of the busiest link (a node's, a supernode's uplink) or rank (its sums), at most `in_flight` at once.
    Uplinks and nodes' links are charged for the ranks that use them: a ring, where few do, costs less than its
    `price`. If all ranks do the same, the result is within a few percent of `simulate`. If they use a link in turn
    (`multicolor` and `pipeline` with several ranks per node), it is up to twice as long.

    Above 256 ranks, only the nodes of 256 ranks are examined. The chain is then the largest of their prices, which
    misses chains through many ranks (`pipeline`), and all supernodes are assumed to be equally busy.
    """
    everyone = placement.ranks <= MAX_EXAMINED_RANKS
    nodes = sorted({placement.node_of(rank) for rank in spread(placement.ranks)})
    programs = {rank: algorithm(rank, placement.ranks) for node in nodes for rank in placement.nodes[node]}
    chunks = programs[placement.nodes[0][0]].chunks
    pieces = max(1, int(-(-nbytes // (chunks * piece_bytes))))
    busy = _busy(programs, placement, network, nbytes / (pieces * chunks))
    if everyone:
        shared = replace(network, beta=network.beta * busy.mates)
        chain = _chain(programs, placement, shared, nbytes / (pieces * chunks), busy.crossing * busy.mates)
    else:
        crossing = dict.fromkeys(placement.supernodes or (0,), busy.crossing)
        chain = most_expensive(programs.__getitem__, programs, placement, network, nbytes / pieces, crossing)
    pace = max(busy.seconds, chain / min(in_flight, pieces))
    return max(chain, busy.seconds) + (pieces - 1) * pace


def latency_bound(algorithm: Algorithm, placement: Placement, network: Network) -> Amount:
    """Return seconds that no `estimate` of this schedule is below: the alphas of rank 0's rounds, one after another."""
    lanes = loads(algorithm(0, placement.ranks), 0, placement)
    return max(sum(latency(load, network) for load in lane) for lane in lanes)


def _busy(programs: Mapping[int, Program], placement: Placement, network: Network, chunk: Amount) -> _Busy:
    of_rank = {rank: total(loads(program, rank, placement)) for rank, program in programs.items()}
    of_node: defaultdict[int, Load] = defaultdict(Load)
    for rank, load in of_rank.items():
        of_node[placement.node_of(rank)] = of_node[placement.node_of(rank)].with_(load)
    link = max(max(load.node_out, load.node_in) for load in of_node.values())
    most_across = max(max(load.uplink_out, load.uplink_in) for load in of_node.values())
    uplink = _uplink(of_node, placement)
    crossing = network.beta
    if most_across:
        crossing = max(network.beta, (network.uplink_beta or 0) * (uplink / most_across))
    seconds_a_byte = (
        link * network.beta,
        uplink * (network.uplink_beta or 0),
        max(load.added for load in of_rank.values()) * network.gamma,
        max(max(load.within_out, load.within_in) for load in of_rank.values()) * network.within_beta,
    )
    alone = max(max(load.node_out, load.node_in) for load in of_rank.values())
    message_seconds = max(load.messages for load in of_rank.values()) * network.overhead
    return _Busy(
        max(max(seconds_a_byte) * chunk, message_seconds), crossing, Fraction(link, alone or 1) if link else Fraction(1)
    )


def _uplink(of_node: Mapping[int, Load], placement: Placement) -> Fraction:
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


def _chain(
    programs: Mapping[int, Program], placement: Placement, network: Network, chunk: Amount, crossing: Amount
) -> Amount:
    """Return the end of the last round of one piece, if a round starts once it and its partners' rounds have begun.

    It then lasts as long as the slowest of them takes alone. A round that never begins is left to `verify`.
    """
    rounds: list[_Round] = []
    sent: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, program in programs.items():
        for lane, (lane_rounds, lane_loads) in enumerate(
            zip(program.lanes, loads(program, rank, placement), strict=True)
        ):
            for number, (transfers, load) in enumerate(zip(lane_rounds, lane_loads, strict=True), 1):
                for action, peer, _, _ in transfers:
                    ends = sent[rank, peer, lane] if action is Action.SEND else received[peer, rank, lane]
                    ends.append(len(rounds))
                passing = latency(load, network) + link_seconds(load, load, network, crossing, chunk)
                own = load.added * network.gamma * chunk + load.messages * network.overhead
                rounds.append(_Round(passing, own, number == 1, number == len(lane_rounds)))
    partners: list[list[int]] = [[] for _ in rounds]
    for between, senders in sent.items():
        for one, other in zip(senders, received[between], strict=False):
            partners[one].append(other)
            partners[other].append(one)
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
    began: dict[int, Amount] = {number: 0 for number, one in enumerate(rounds) if one.first}
    awaiting = [1 + len(others) for others in partners]
    just_begun = deque(began)
    while just_begun:
        starting = just_begun.popleft()
        for number in (starting, *partners[starting]):
            awaiting[number] -= 1
            if awaiting[number]:
                continue
            involved = (number, *partners[number])
            end = max(began[one] for one in involved) + max(rounds[one].passing for one in involved)
            end += rounds[number].summing
            latest = max(latest, end)
            if not rounds[number].last:
                began[number + 1] = end
                just_begun.append(number + 1)
    return latest
