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
from heapq import heappop, heappush

import numpy as np

from unisono.errors import ScheduleError
from unisono.network.links import Network
from unisono.network.routes import Routes
from unisono.network.sharing import fair_rates
from unisono.network.traffic import Numbers, Seconds, Traffic, traffic
from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm

EXACT_RESOLUTION, COARSE_RESOLUTION = 1e-9, 2e-3
"""Fractions of the elapsed time within which events count as simultaneous."""

MAX_EXACT_FLOWS = 4_000_000
"""Number of flows, over all steps, after which time becomes coarse."""

START, ARRIVE, END = range(3)
"""Kinds of events: flows begin, messages within a node arrive, sums of rounds end."""


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


def simulate(
    algorithm: Algorithm,
    placement: Placement,
    network: Network,
    nbytes: int,
    piece_bytes: int = 1 << 19,
    in_flight: int = 8,
    eager: int = 1 << 16,
    max_exact_flows: int = MAX_EXACT_FLOWS,
) -> Simulated:
    """Simulate the schedule on a payload of `nbytes` bytes in pieces whose chunks have at most `piece_bytes` bytes.

    A message flows once both ends have begun its round or, if it has at most `eager` bytes, once its sender has; its
    bytes follow alpha later. Between two ranks one message flows at a time, as on one connection, and all pairs that
    use a link have fair shares of it. Within a node, a message takes within_alpha, plus within_beta per byte,
    regardless of other messages. A round ends when its messages have arrived and then been summed, at gamma per byte
    and an overhead per message, independently of other rounds.

    With very many unsynchronized flows, events are handled one by one until `max_exact_flows` flows were counted (some
    seconds of work). Then events within 0.2% of the elapsed time are handled together; the error is about 3%.

    Raises NetworkError, with the number of messages, above 20 million messages.
    """
    every = traffic(algorithm, placement.ranks, nbytes, piece_bytes)
    routes = Routes(every, placement, network)
    play = _Play(every, routes, network, in_flight, eager, max_exact_flows)
    play.run()
    return Simulated(play.now, len(every.nbytes) * every.pieces, *routes.busiest(every), play.steps, play.resolution)


class _Play:
    """State of all ranks at one moment. Messages and rounds of piece k: numbers of piece 0, plus k times all."""

    def __init__(
        self, every: Traffic, routes: Routes, network: Network, in_flight: int, eager: int, max_exact_flows: int
    ) -> None:
        self.every, self.routes = every, routes
        self.now, self.steps, self.exact_flows_left, self.resolution = 0.0, 0, max_exact_flows, EXACT_RESOLUTION
        self.tickets, self.most_tickets = in_flight * every.lanes, every.pieces * every.lanes
        self.messages = len(every.nbytes)
        self.alpha = np.where(routes.within, float(network.within_alpha), float(network.alpha))
        self.alpha += np.where(routes.within, every.nbytes * float(network.within_beta), 0)
        self.eager = every.nbytes <= eager
        self.by_receiver = np.argsort(every.received_in, kind="stable")
        sends = np.bincount(every.sent_in, minlength=every.rounds)
        receives = np.bincount(every.received_in, minlength=every.rounds)
        self.summing = every.added * float(network.gamma) + (sends + receives) * float(network.overhead)
        self.first_sent, self.first_received = (
            np.concatenate([[0], np.cumsum(counts)]) for counts in (sends, receives)
        )
        self.missing = np.tile(
            (sends + receives).astype(np.int32), every.pieces
        )  # of each round: messages that have not arrived
        self.begun = np.zeros(every.rounds * every.pieces, bool)
        self.ready = np.zeros(len(every.nbytes) * every.pieces, np.int8)  # of each message: ends that have begun
        self.next_ticket = np.zeros(every.ranks, np.int64)
        self.events: list[tuple[float, int, int, Numbers]] = []
        self.events_scheduled = 0  # distinguishes events of the same time
        self.busy = np.zeros(routes.pairs, bool)  # for each pair of ranks, whether a message flows
        self.queue = self.flowing = np.empty(0, np.int64)
        self.left, self.rates = np.empty(0), np.empty(0)

    def run(self) -> None:
        """Run to the end. Raises ScheduleError if rounds wait forever."""
        self._begin_all(self._open(np.repeat(np.arange(self.every.ranks), min(self.tickets, self.most_tickets))))
        while len(self.flowing) or self.events:
            self._step()
        if not self.begun.all() or self.missing.any():
            raise ScheduleError(f"{np.count_nonzero(self.missing)} rounds wait forever; `verify` says which")

    def _step(self) -> None:
        """Advance to the next event, and handle all its consequences at that time."""
        self.steps += 1
        self.exact_flows_left -= len(self.flowing)
        soonest = self.events[0][0] if self.events else np.inf
        if len(self.flowing):
            soonest = min(soonest, self.now + float((self.left / self.rates).min()))
        if self.exact_flows_left < 0:
            self.resolution = COARSE_RESOLUTION
            soonest *= 1 + COARSE_RESOLUTION / 2  # some too late, some too early: correct on average
        due: tuple[list[Numbers], ...] = [], [], []
        while self.events and self.events[0][0] <= soonest * (1 + self.resolution / 2):
            _, _, event, numbers = heappop(self.events)
            due[event].append(numbers)
        due[ARRIVE].append(self._flow(soonest))
        self._begin_all(
            self._next_rounds(np.concatenate([*due[END], self._sum(self._arrive(np.concatenate(due[ARRIVE])))]))
        )
        if due[START] or len(due[ARRIVE][-1]):
            self._start_flows(np.concatenate([self.queue, *due[START]]))

    def _start_flows(self, queue: Numbers) -> None:
        """Start the first queued message of each idle pair of ranks, and recompute the shares of links."""
        pair = self.routes.pair[queue % self.messages]
        first = np.zeros(len(queue), bool)
        first[np.unique(pair, return_index=True)[1]] = True
        first &= ~self.busy[pair]
        self.busy[pair[first]] = True
        self.queue, starting = queue[~first], queue[first]
        self.flowing = np.concatenate([self.flowing, starting])
        self.left = np.concatenate([self.left, self.every.nbytes[starting % self.messages]])
        self.rates = fair_rates(self.routes.links[self.flowing % self.messages], self.routes.capacities)

    def _flow(self, until: float) -> Numbers:
        """Let bytes flow until that time; return the messages that have arrived."""
        self.left -= self.rates * (until - self.now)
        self.now = until
        still = self.left > self.rates * (self.resolution / 2 * until)
        if still.all():
            return self.flowing[:0]
        arrived = self.flowing[~still]
        self.busy[self.routes.pair[arrived % self.messages]] = False
        self.flowing, self.left, self.rates = self.flowing[still], self.left[still], self.rates[still]
        return arrived

    def _begin_all(self, rounds: Numbers) -> None:
        """Begin rounds, and the following ones if there is nothing to wait for."""
        while len(rounds):
            rounds = self._next_rounds(self._sum(self._begin(rounds)))

    def _begin(self, rounds: Numbers) -> Numbers:
        """Begin rounds; return those of them whose messages have all arrived."""
        piece, number = np.divmod(rounds, self.every.rounds)
        self.begun[rounds] = True
        receives, of_receive = _runs(self.first_received, number)
        sends, of_send = _runs(self.first_sent, number)
        receives = self.by_receiver[receives] + piece[of_receive] * self.messages
        eager = self.eager[sends]
        sends += piece[of_send] * self.messages
        self.ready[receives] += 1
        met = receives[self.ready[receives] == 2]
        self.ready[sends] += 1 + eager
        self._schedule_messages(np.concatenate([met, sends[self.ready[sends] >= 2]]))
        complete: Numbers = rounds[self.missing[rounds] == 0]
        return complete

    def _schedule_messages(self, messages: Numbers) -> None:
        of_piece = messages % self.messages
        delays, within = self.alpha[of_piece], self.routes.within[of_piece]
        self._schedule(START, messages[~within], delays[~within])
        self._schedule(ARRIVE, messages[within], delays[within])

    def _arrive(self, messages: Numbers) -> Numbers:
        """Count arrived messages; return the rounds that are now complete."""
        if not len(messages):
            return messages
        piece, of_piece = np.divmod(messages, self.messages)
        ends = np.concatenate([self.every.sent_in[of_piece], self.every.received_in[of_piece]])
        ends += np.tile(piece * self.every.rounds, 2)
        np.subtract.at(self.missing, ends, 1)
        complete: Numbers = np.unique(ends[(self.missing[ends] == 0) & self.begun[ends]])
        return complete

    def _sum(self, rounds: Numbers) -> Numbers:
        """Begin the sums of complete rounds; return those of them that take no time."""
        if not len(rounds):
            return rounds
        delays = self.summing[rounds % self.every.rounds]
        busy = delays > 0
        self._schedule(END, rounds[busy], delays[busy])
        return rounds[~busy]

    def _next_rounds(self, rounds: Numbers) -> Numbers:
        """Return the following rounds: the next of the same ticket, or the first of the rank's next ticket."""
        if not len(rounds):
            return rounds
        number = rounds % self.every.rounds
        thread = self.every.thread[number]
        last = number + 1 == self.every.first_round[thread + 1]
        return np.concatenate([rounds[~last] + 1, self._open(thread[last] // self.every.lanes)])

    def _open(self, ranks: Numbers) -> Numbers:
        """Return the first rounds of the next ticket of each rank; a rank may occur more than once."""
        if not len(ranks):
            return ranks
        ranks = np.sort(ranks)
        ticket = self.next_ticket[ranks] + np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
        np.add.at(self.next_ticket, ranks, 1)
        ranks, ticket = ranks[ticket < self.most_tickets], ticket[ticket < self.most_tickets]
        piece, lane = np.divmod(ticket, self.every.lanes)
        thread = ranks * self.every.lanes + lane
        first = self.every.first_round[thread]
        idle = first == self.every.first_round[thread + 1]
        begun = first[~idle] + piece[~idle] * self.every.rounds
        return np.concatenate([begun, self._open(ranks[idle])]) if idle.any() else begun

    def _schedule(self, event: int, numbers: Numbers, delays: Seconds) -> None:
        """Schedule an event for each distinct delay."""
        if len(numbers):
            order = np.argsort(delays, kind="stable")
            starts = np.flatnonzero(np.diff(delays[order], prepend=-1))
            for delay, some in zip(delays[order][starts], np.split(numbers[order], starts[1:]), strict=True):
                self.events_scheduled += 1
                heappush(self.events, (self.now + float(delay), self.events_scheduled, event, some))


def _runs(first: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Return first[n], first[n] + 1, ..., first[n + 1] - 1 for each n of `number`, and for each the index of its n."""
    counts = first[number + 1] - first[number]
    of = np.repeat(np.arange(len(number)), counts)
    return first[number][of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of], of
