"""All messages of a schedule as arrays: the rounds of sender and receiver, the bytes, and the links on the way.

    rank   0            1            2 ...
    lane   0     1      0     1
    round  0 1 2 3 4 5  6 7 ...              numbered through; a message is a pair of rounds: (sent in, received in)

    number   0 ... n-1      n ... 2n-1     2n ... 2n+s-1     2n+s ... 2n+2s-1     2n+2s
    link     out of nodes   into nodes     out of supernodes into supernodes      none: no limit

Programs are made one after another and discarded; only a few numbers per message are kept.

Between two ranks one message flows at a time, as on one connection: others wait in a queue. Links are shared as evenly
as possible (max-min fairness, by progressive filling):

    link 0  ├ flow a ┤├ flow b ┤              a and b get half of link 0 each,
    link 1  ├ flow b ┤├────────── flow c ─┤   and c what b leaves of link 1

No flow can get a higher rate without taking it from a flow whose rate is not higher.
Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.network.links import Network, NetworkError, Uneven
from unisono.network.price import spread
from unisono.placement import Placement
from unisono.schedules.pieces import Cut, cut
from unisono.schedules.schedule import Action, Algorithm, Program

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]

MAX_MESSAGES = 20_000_000
"""Largest number of messages; more would take gigabytes and minutes."""

ELEMENT_BYTES = 4
"""Bytes of an element; payloads are cut at multiples of it."""

SHARE_TOLERANCE = 1e-12
"""Relative difference below which shares are equal: sums of the same numbers in another order."""

NUMBERS = {action: index for index, action in enumerate(Action)}
"""Number of each action in arrays: 0 for SEND, 1 for RECEIVE, 2 for ADD."""


@dataclass(frozen=True)
class Traffic:
    """Messages of one piece, in the order of the rounds that send them; equal for every piece."""

    ranks: int
    lanes: int
    pieces: int
    first_round: Numbers
    """Index of the first round of each rank and lane, followed by the number of all rounds."""
    thread: Numbers
    """Rank x lanes + lane, for each round."""
    sent_in: Numbers
    received_in: Numbers
    """Round of the receiver of each message; `sent_in` is that of the sender."""
    nbytes: Seconds
    """Bytes of each message."""
    added: Seconds
    """Bytes that each round sums into place."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.thread)

    @cached_property
    def first_sent(self) -> Numbers:
        """Index of the first message that each round sends, followed by the number of all messages."""
        return _starts(self.sent_in, self.rounds)

    @cached_property
    def by_receiver(self) -> Numbers:
        """Messages in the order of the rounds that receive them."""
        return np.argsort(self.received_in, kind="stable")

    @cached_property
    def first_received(self) -> Numbers:
        """Index in `by_receiver` of the first message that each round receives, followed by the number of all."""
        return _starts(self.received_in, self.rounds)


def _starts(round_of: Numbers, rounds: int) -> Numbers:
    return np.concatenate([[0], np.cumsum(np.bincount(round_of, minlength=rounds))])


def traffic(algorithm: Algorithm, ranks: int, nbytes: int, piece_bytes: int) -> Traffic:
    """Return the messages of a payload of `nbytes` bytes in pieces whose chunks have at most `piece_bytes` bytes.

    Chunks without elements are omitted, as in a play; the others have equal sizes. Raises ScheduleError if sent and
    received messages do not match, NetworkError for too many messages.
    """
    cuts = _cut_if_few(algorithm, ranks, nbytes, piece_bytes)
    lanes, (rounds, transfers, action, peer, chunk, span) = _ends_of(algorithm(rank, ranks) for rank in range(ranks))
    sends, receives = np.flatnonzero(action == NUMBERS[Action.SEND]), np.flatnonzero(action != NUMBERS[Action.SEND])
    nbytes_of = _sizes(cuts, nbytes, chunk, span)
    first_round = np.concatenate([[0], np.cumsum(rounds)])
    thread = np.repeat(np.arange(len(rounds)), rounds)
    round_of = np.repeat(np.arange(len(thread)), transfers)
    lane, rank = thread[round_of] % lanes, thread[round_of] // lanes
    sent = sends[np.argsort((lane * ranks + rank)[sends] * ranks + peer[sends], kind="stable")]
    taken = receives[np.argsort((lane * ranks + peer)[receives] * ranks + rank[receives], kind="stable")]
    if (
        len(sent) != len(taken)
        or ((span[sent] != span[taken]) | (rank[sent] != peer[taken]) | (peer[sent] != rank[taken])).any()
    ):
        raise ScheduleError(
            f"{len(sends)} messages are sent on {ranks} ranks that do not match the received ones; `verify` says more"
        )
    received_in = np.empty(len(action), np.int64)
    received_in[sent] = round_of[taken]
    some = sends[nbytes_of[sends] > 0]
    sums = np.flatnonzero(action == NUMBERS[Action.ADD])
    return Traffic(
        ranks=ranks,
        lanes=lanes,
        pieces=cuts.pieces,
        first_round=first_round,
        thread=thread,
        sent_in=round_of[some],
        received_in=received_in[some],
        nbytes=nbytes_of[some],
        added=np.bincount(round_of[sums], nbytes_of[sums], minlength=len(thread)).astype(np.float64),
    )


def _ends_of(programs: Iterable[Program]) -> tuple[int, list[Numbers]]:
    """Return the number of lanes of the programs of ranks 0, 1, ..., and the ends of their messages: the number of
    rounds of each rank and lane, that of transfers of each round, and of each transfer its action, by NUMBERS, peer,
    chunk and span. Raises ScheduleError for different numbers of lanes."""
    rounds, transfers, action, peer, chunk, span = (array("i") for _ in range(6))
    lanes = 0
    for program in programs:
        if lanes and len(program.lanes) != lanes:
            raise ScheduleError(f"a rank has {len(program.lanes)} lanes where rank 0 has {lanes}")
        lanes = len(program.lanes)
        for lane in program.lanes:
            rounds.append(len(lane))
            transfers.extend(map(len, lane))
            flat = list(chain.from_iterable(lane))
            action.extend([NUMBERS[t[0]] for t in flat])
            peer.extend([t[1] for t in flat])
            chunk.extend([t[2] for t in flat])
            span.extend([t[3] for t in flat])
    return lanes, [np.array(column, np.int64) for column in (rounds, transfers, action, peer, chunk, span)]


def _cut_if_few(algorithm: Algorithm, ranks: int, nbytes: int, piece_bytes: int) -> Cut:
    """Return the cut. Raises NetworkError for too many messages, estimated from the sends of a few ranks."""
    if nbytes < 0 or piece_bytes < 1:
        raise NetworkError(f"{nbytes} bytes in pieces of {piece_bytes} cannot be cut")
    some = spread(ranks, 8)
    sends = 0
    for rank in some:
        program = algorithm(rank, ranks)
        sends += sum(t.action is Action.SEND for lane in program.lanes for transfers in lane for t in transfers)
    cuts = cut(-(-nbytes // ELEMENT_BYTES), program.chunks, piece_bytes // ELEMENT_BYTES)
    messages = sends * ranks // len(some) * cuts.pieces
    if messages > MAX_MESSAGES:
        raise NetworkError(
            f"about {messages:,} messages of {ranks:,} ranks, in {cuts.pieces:,} pieces, are too many to simulate; "
            f"the limit is {MAX_MESSAGES:,}. Use larger pieces; or `price` or `estimate`, which examine some ranks only"
        )
    return cuts


def _sizes(cuts: Cut, nbytes: int, chunk: Numbers, span: Numbers) -> Seconds:
    """Return the bytes of transfers of one piece. With fewer elements than chunks, some have none."""
    elements = cuts.length // cuts.pieces
    if elements >= cuts.chunks:
        return span.astype(np.float64) * (nbytes / (cuts.pieces * cuts.chunks))
    counts = elements * (chunk + span) // cuts.chunks - elements * chunk // cuts.chunks
    return counts.astype(np.float64) * (nbytes / max(1, cuts.length))


class Routes:
    """Links that each message uses. An extra link without a limit fills the rows of messages that use fewer."""

    def __init__(self, workload: Traffic, placement: Placement, network: Network, uneven: Uneven) -> None:
        node = np.array(placement.node_of_rank)
        supernode = np.array(placement.supernodes or (0,) * len(placement.nodes))
        self.nodes, self.supernodes = len(placement.nodes), int(supernode.max()) + 1
        sender, receiver = (
            workload.thread[rounds] // workload.lanes for rounds in (workload.sent_in, workload.received_in)
        )
        from_node, to_node = node[sender], node[receiver]
        self.within = from_node == to_node
        across = supernode[from_node] != supernode[to_node]
        rates = [1 / (float(network.beta) * factor) for factor in uneven.factors(placement)]
        links, limits, unlimited = [from_node, to_node + self.nodes], rates * 2, 2 * (self.nodes + self.supernodes)
        if network.oversubscribed and across.any():
            out = 2 * self.nodes + supernode[from_node]
            into = 2 * self.nodes + self.supernodes + supernode[to_node]
            links += [np.where(across, link, unlimited) for link in (out, into)]
        limits += [1 / float(network.uplink_beta or 0) if network.oversubscribed else np.inf] * (2 * self.supernodes)
        ends, self.pair = np.unique(sender * workload.ranks + receiver, return_inverse=True)
        self.pairs = len(ends)
        self.links = np.stack(links, axis=1)
        self.capacities = np.array([*limits, np.inf])

    def seconds(self, workload: Traffic) -> Seconds:
        """Return the seconds that each link needs for all its bytes at its full rate."""
        loads: Seconds = np.zeros(len(self.capacities))
        for links in self.links[~self.within].T:
            loads += np.bincount(links, workload.nbytes[~self.within], minlength=len(loads))
        loads *= workload.pieces / self.capacities
        return loads

    def name(self, link: int) -> str:
        """Return the name of a link, such as "out of node 3"."""
        kinds = ("out of node", "into node", "out of supernode", "into supernode")
        counts = (self.nodes, self.nodes, self.supernodes, self.supernodes)
        for kind, count in zip(kinds, counts, strict=True):
            if link < count:
                return f"{kind} {link}"
            link -= count
        return "no link"


def fair_rates(routes: Numbers, capacities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bytes per second of each flow; `routes` has a row of links per flow, one at least with a limit.

    A link is full if it limits all its users. All such links are filled at once, so there are few passes.
    """
    if routes.size < len(capacities):  # few flows use few of many links
        used, numbers = np.unique(routes, return_inverse=True)
        routes, capacities = numbers.reshape(routes.shape), capacities[used]
    rates = np.empty(len(routes))
    waiting = np.arange(len(routes))
    left, width = capacities.copy(), routes.shape[1]
    while len(waiting):
        route = routes[waiting]
        users = np.bincount(route.ravel(), minlength=len(left))
        share = np.divide(left, users, out=np.full(len(left), np.inf), where=users > 0)
        offered = share[route].min(axis=1)
        if offered.min() >= offered.max() * (1 - SHARE_TOLERANCE):
            rates[waiting] = offered
            break
        least_offered = np.full(len(left), np.inf)
        np.minimum.at(least_offered, route.ravel(), np.repeat(offered, width))
        full = (least_offered >= share * (1 - SHARE_TOLERANCE)) & (users > 0)
        limited = full[route].any(axis=1)
        rates[waiting[limited]] = offered[limited]
        taken = np.repeat(offered[limited], width)
        left = np.maximum(left - np.bincount(route[limited].ravel(), taken, minlength=len(left)), 0)
        waiting = waiting[~limited]
    return rates


class Flows:
    """Messages that flow, and those that wait for their connection. Numbers of piece k: those of piece 0, plus k times
    all."""

    def __init__(self, workload: Traffic, routes: Routes) -> None:
        self.nbytes, self.routes, self.messages = workload.nbytes, routes, len(workload.nbytes)
        self.busy = np.zeros(routes.pairs, bool)  # for each pair of ranks, whether a message flows
        self.place = np.empty(routes.pairs, np.int64)
        self.queue = self.flowing = np.empty(0, np.int64)
        self.left, self.rates = np.empty(0), np.empty(0)  # of each message that flows

    def start(self, messages: Numbers) -> None:
        """Queue messages, start the first one of each idle pair of ranks, and recompute the shares of links."""
        queue = np.concatenate([self.queue, messages])
        pair = self.routes.pair[queue % self.messages]
        order = np.arange(len(queue))
        self.place[pair[::-1]] = order[::-1]  # of equal pairs, the first one stays
        first = (self.place[pair] == order) & ~self.busy[pair]
        self.busy[pair[first]] = True
        starting, self.queue = queue[first], queue[~first]
        self.flowing = np.concatenate([self.flowing, starting])
        self.left = np.concatenate([self.left, self.nbytes[starting % self.messages]])
        self.rates = fair_rates(self.routes.links[self.flowing % self.messages], self.routes.capacities)

    def flow(self, seconds: float, ended: NDArray[np.bool_]) -> Numbers:
        """Let bytes flow; return the messages that have arrived, those that `ended`."""
        arrived = self.flowing[ended]
        self.busy[self.routes.pair[arrived % self.messages]] = False
        self.left = (self.left - self.rates * seconds)[~ended]
        self.flowing, self.rates = self.flowing[~ended], self.rates[~ended]
        return arrived
