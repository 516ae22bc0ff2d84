"""Play of a collective on a network: the state of all ranks at one moment, from one event to the next.

    event    START  bytes of messages begin to flow      ARRIVE  messages within a node arrive
             END    sums of rounds end                   ENTER   late ranks begin
    step     the next event or the next end of a flow; all that is due at that time; the shares of links anew

Times of rounds and messages are recorded: the critical path explains the result by them.

Between two ranks one message flows at a time, as on one connection: others wait in a queue. Links are shared as evenly
as possible (max-min fairness, by progressive filling):

    link 0  ├ flow a ┤├ flow b ┤              a and b get half of link 0 each,
    link 1  ├ flow b ┤├────────── flow c ─┤   and c what b leaves of link 1

No flow can get a higher rate without taking it from a flow whose rate is not higher.
Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ScheduleError
from unisono.network.links import Network
from unisono.network.traffic import Numbers, Routes, Seconds, Traffic

EXACT_RESOLUTION, COARSE_RESOLUTION = 1e-9, 2e-3
"""Fractions of the elapsed time within which events count as simultaneous."""

MAX_EXACT_FLOWS = 20_000_000
"""Number of flows, over all steps, after which time becomes coarse: some seconds of work."""

SHARE_TOLERANCE = 1e-12
"""Relative difference below which shares are equal: sums of the same numbers in another order."""

START, ARRIVE, END, ENTER = range(4)
"""Kinds of events."""


class Play:
    """State of all ranks at one moment. Messages and rounds of piece k: numbers of piece 0, plus k times all."""

    def __init__(
        self,
        every: Traffic,
        routes: Routes,
        network: Network,
        in_flight: int,
        eager: int,
        starts: Seconds,
        max_exact_flows: int,
    ) -> None:
        self.every, self.routes, self.starts = every, routes, starts
        self.now, self.steps, self.exact_flows_left, self.resolution = 0.0, 0, max_exact_flows, EXACT_RESOLUTION
        self.tickets, self.most_tickets = in_flight * every.lanes, every.pieces * every.lanes
        self.messages = len(every.nbytes)
        self.alpha = np.where(routes.within, float(network.within_alpha), float(network.alpha))
        self.alpha += np.where(routes.within, every.nbytes * float(network.within_beta), 0)
        self.eager = every.nbytes <= eager
        transfers = np.diff(every.first_sent) + np.diff(every.first_received)
        self.summing = every.added * float(network.gamma) + transfers * float(network.overhead)
        self.missing = np.tile(
            transfers.astype(np.int32), every.pieces
        )  # of each round: messages that have not arrived
        self.ready = np.zeros(len(every.nbytes) * every.pieces, np.int8)  # of each message: ends that have begun
        self.begun_at = np.full(every.rounds * every.pieces, np.inf)
        self.ended_at = np.full(every.rounds * every.pieces, np.inf)
        self.arrived_at = np.full(len(every.nbytes) * every.pieces, np.inf)
        self.next_ticket = np.zeros(every.ranks, np.int64)
        self.events: list[tuple[float, int, int, Numbers]] = []
        self.events_scheduled = 0  # distinguishes events of the same time
        self.place = np.empty(every.rounds * every.pieces, np.int64)
        self.flows = Flows(every, routes)

    def run(self) -> None:
        """Run to the end. Raises ScheduleError if rounds wait forever."""
        tickets = min(self.tickets, self.most_tickets)
        punctual, late = np.flatnonzero(self.starts == 0), np.flatnonzero(self.starts)
        self._schedule(ENTER, np.repeat(late, tickets), np.repeat(self.starts[late], tickets))
        self._begin_all(self._open(np.repeat(punctual, tickets)))
        while len(self.flows.flowing) or self.events:
            self._step()
        if np.isinf(self.begun_at).any() or self.missing.any():
            raise ScheduleError(f"{np.count_nonzero(self.missing)} rounds wait forever; `verify` says which")

    def ends(self) -> Seconds:
        """Return the seconds after which each rank ends; for a rank without rounds, the seconds of its start."""
        latest = self.starts.copy()
        rank = self.every.thread // self.every.lanes
        np.maximum.at(latest, np.tile(rank, self.every.pieces), self.ended_at)
        return latest

    def _step(self) -> None:
        """Advance to the next event, and handle all its consequences at that time."""
        self.steps += 1
        self.exact_flows_left -= len(self.flows.flowing)
        flows_end = self.flows.ends(self.now)
        soonest = min(self.events[0][0] if self.events else np.inf, float(flows_end.min(initial=np.inf)))
        if self.exact_flows_left < 0:
            self.resolution = COARSE_RESOLUTION
        until = soonest * (1 + self.resolution)
        due: tuple[list[Numbers], ...] = [], [], [], []
        times = []
        while self.events and self.events[0][0] <= until:
            time, _, event, numbers = heappop(self.events)
            due[event].append(numbers)
            times.append(time)
        flowed, before = flows_end <= until, self.now
        self.now = soonest
        if self.resolution == COARSE_RESOLUTION:  # some too late, some too early: correct on average
            self.now = float(np.concatenate([times, flows_end[flowed]]).mean())
        due[ARRIVE].append(self.flows.flow(self.now - before, flowed))
        entering = self._open(np.concatenate(due[ENTER])) if due[ENTER] else due[ARRIVE][-1][:0]
        ended = np.concatenate([*due[END], self._sum(self._arrive(np.concatenate(due[ARRIVE])))])
        self._begin_all(np.concatenate([entering, self._next_rounds(ended)]))
        if due[START] or len(due[ARRIVE][-1]):
            self.flows.start(np.concatenate([due[ARRIVE][-1][:0], *due[START]]))

    def _begin_all(self, rounds: Numbers) -> None:
        """Begin rounds, and the following ones if there is nothing to wait for."""
        while len(rounds):
            rounds = self._next_rounds(self._sum(self._begin(rounds)))

    def _begin(self, rounds: Numbers) -> Numbers:
        """Begin rounds; return those of them whose messages have all arrived."""
        piece, number = np.divmod(rounds, self.every.rounds)
        self.begun_at[rounds] = self.now
        receives, of_receive = _runs(self.every.first_received, number)
        sends, of_send = _runs(self.every.first_sent, number)
        receives = self.every.by_receiver[receives] + piece[of_receive] * self.messages
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
        self.arrived_at[messages] = self.now
        piece, of_piece = np.divmod(messages, self.messages)
        ends = np.concatenate([self.every.sent_in[of_piece], self.every.received_in[of_piece]])
        ends += np.tile(piece * self.every.rounds, 2)
        np.subtract.at(self.missing, ends, 1)
        complete = ends[(self.missing[ends] == 0) & (self.begun_at[ends] <= self.now)]
        order = np.arange(len(complete))
        self.place[complete] = order  # of equal ones, the last stays
        distinct: Numbers = complete[self.place[complete] == order]
        return distinct

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
        self.ended_at[rounds] = self.now
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
        if not len(numbers):
            return
        if delays.min() == delays.max():
            self._push(event, numbers, float(delays[0]))
            return
        order = np.argsort(delays, kind="stable")
        starts = np.flatnonzero(np.diff(delays[order], prepend=-1))
        for delay, some in zip(delays[order][starts], np.split(numbers[order], starts[1:]), strict=True):
            self._push(event, some, float(delay))

    def _push(self, event: int, numbers: Numbers, delay: float) -> None:
        self.events_scheduled += 1
        heappush(self.events, (self.now + delay, self.events_scheduled, event, numbers))


def _runs(first: Numbers, number: Numbers) -> tuple[Numbers, Numbers]:
    """Return first[n], first[n] + 1, ..., first[n + 1] - 1 for each n of `number`, and for each the index of its n."""
    counts = first[number + 1] - first[number]
    of = np.repeat(np.arange(len(number)), counts)
    return first[number][of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of], of


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

    def __init__(self, every: Traffic, routes: Routes) -> None:
        self.nbytes, self.routes, self.messages = every.nbytes, routes, len(every.nbytes)
        self.busy = np.zeros(routes.pairs, bool)  # for each pair of ranks, whether a message flows
        self.place = np.empty(routes.pairs, np.int64)
        self.queue = self.flowing = np.empty(0, np.int64)
        self.left, self.rates = np.empty(0), np.empty(0)  # of each message that flows

    def ends(self, now: float) -> Seconds:
        """Return the seconds at which each message arrives, if rates stay as they are."""
        return now + self.left / self.rates

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
