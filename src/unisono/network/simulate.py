"""Simulation of a collective on a network: messages are flows, and flows share links.

    rank    round begins ─┐          ┌─ round ends, received data is summed, the next begins
            both have: alpha, then ═════ bytes flow ═════
    links   sender's node ══ its supernode's uplink ══ the receiver's uplink ══ the receiver's node     (each one way)

The simulation plays a program as `transports/player.py` does: the payload is cut into pieces, and each piece goes
through every lane independently, at most `in_flight` at once. Time advances from one event to the next, and
simultaneous events are handled together. So a schedule in which all ranks do the same costs a few steps for any number
of ranks.

The result is explained by the critical path: the chain of waits from the end of the last rank back to the start.

    rank 2   ── round ends ◀─ sums ◀─ a message arrives ◀─ bytes on a link ◀─ alpha ◀┐
    rank 1                                              the later of both ends ── round begins ◀─ round before ends ...

Worked example: rank 0 of 2 is 5 ms late, one message of 1 ms alpha and 8 ms on the link to rank 1. Rank 1 ends last, at
14 ms: 8 ms for bytes on the link out of node 0, 1 ms for latency, 5 ms because rank 0 enters late.

The waits partition the time: their sum is the end of the last rank. Bytes are charged to the link of their route with
the most seconds of traffic in all; so are those of earlier messages of the same two ranks.

A play is the state of all ranks at one moment; it goes from one event to the next:

    event    START  bytes of messages begin to flow      ARRIVE  messages within a node arrive
             END    sums of rounds end                   ENTER   late ranks begin
    step     the next event or the next end of a flow; all that is due at that time; the shares of links anew
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from unisono.errors import ScheduleError
from unisono.network.links import EVEN, Network, Uneven
from unisono.network.traffic import Flows, Numbers, Routes, Seconds, Traffic, traffic
from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm

EXACT_RESOLUTION, COARSE_RESOLUTION = 1e-9, 2e-3
"""Fractions of the elapsed time within which events count as simultaneous."""

MAX_EXACT_FLOWS = 20_000_000
"""Number of flows, over all steps, after which time becomes coarse: some seconds of work."""

START, ARRIVE, END, ENTER = range(4)
"""Kinds of events."""


class Play:
    """State of all ranks at one moment. Messages and rounds of piece k: numbers of piece 0, plus k times all."""

    def __init__(
        self,
        workload: Traffic,
        routes: Routes,
        network: Network,
        in_flight: int,
        eager: int,
        starts: Seconds,
        max_exact_flows: int,
    ) -> None:
        self.workload, self.routes, self.starts = workload, routes, starts
        self.now, self.steps, self.exact_flows_left, self.resolution = 0.0, 0, max_exact_flows, EXACT_RESOLUTION
        self.tickets, self.most_tickets = in_flight * workload.lanes, workload.pieces * workload.lanes
        self.messages = len(workload.nbytes)
        self.alpha = np.where(routes.within, float(network.within_alpha), float(network.alpha))
        self.alpha += np.where(routes.within, workload.nbytes * float(network.within_beta), 0)
        self.eager = workload.nbytes <= eager
        transfers = np.diff(workload.first_sent) + np.diff(workload.first_received)
        self.summing = workload.added * float(network.gamma) + transfers * float(network.overhead)
        rounds, messages = workload.rounds * workload.pieces, self.messages * workload.pieces
        self.missing = np.tile(transfers.astype(np.int32), workload.pieces)  # messages of a round that have not arrived
        self.ready = np.zeros(messages, np.int8)  # of each message: ends that have begun
        self.begun_at, self.ended_at = np.full(rounds, np.inf), np.full(rounds, np.inf)
        self.arrived_at = np.full(messages, np.inf)
        self.next_ticket = np.zeros(workload.ranks, np.int64)
        self.events: list[tuple[float, int, int, Numbers]] = []
        self.events_scheduled = 0  # distinguishes events of the same time
        self.place = np.empty(rounds, np.int64)
        self.flows = Flows(workload, routes)

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
        rank = self.workload.thread // self.workload.lanes
        np.maximum.at(latest, np.tile(rank, self.workload.pieces), self.ended_at)
        return latest

    def _step(self) -> None:
        """Advance to the next event, and handle all its consequences at that time."""
        self.steps += 1
        self.exact_flows_left -= len(self.flows.flowing)
        flows_end = self.now + self.flows.left / self.flows.rates  # if rates stay as they are
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
        piece, round_index = np.divmod(rounds, self.workload.rounds)
        self.begun_at[rounds] = self.now
        receives, of_receive = _runs(self.workload.first_received, round_index)
        sends, of_send = _runs(self.workload.first_sent, round_index)
        receives = self.workload.by_receiver[receives] + piece[of_receive] * self.messages
        eager = self.eager[sends]
        sends += piece[of_send] * self.messages
        self.ready[receives] += 1
        met = receives[self.ready[receives] == 2]
        self.ready[sends] += 1 + eager
        messages = np.concatenate([met, sends[self.ready[sends] >= 2]])
        delays, within = self.alpha[messages % self.messages], self.routes.within[messages % self.messages]
        self._schedule(START, messages[~within], delays[~within])
        self._schedule(ARRIVE, messages[within], delays[within])
        complete: Numbers = rounds[self.missing[rounds] == 0]
        return complete

    def _arrive(self, messages: Numbers) -> Numbers:
        """Count arrived messages; return the rounds that are now complete."""
        if not len(messages):
            return messages
        self.arrived_at[messages] = self.now
        piece, of_piece = np.divmod(messages, self.messages)
        ends = np.concatenate([self.workload.sent_in[of_piece], self.workload.received_in[of_piece]])
        ends += np.tile(piece * self.workload.rounds, 2)
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
        delays = self.summing[rounds % self.workload.rounds]
        busy = delays > 0
        self._schedule(END, rounds[busy], delays[busy])
        return rounds[~busy]

    def _next_rounds(self, rounds: Numbers) -> Numbers:
        """Return the following rounds: the next of the same ticket, or the first of the rank's next ticket."""
        if not len(rounds):
            return rounds
        self.ended_at[rounds] = self.now
        round_index = rounds % self.workload.rounds
        thread = self.workload.thread[round_index]
        last = round_index + 1 == self.workload.first_round[thread + 1]
        return np.concatenate([rounds[~last] + 1, self._open(thread[last] // self.workload.lanes)])

    def _open(self, ranks: Numbers) -> Numbers:
        """Return the first rounds of the next ticket of each rank; a rank may occur more than once."""
        if not len(ranks):
            return ranks
        ranks = np.sort(ranks)
        ticket = self.next_ticket[ranks] + np.arange(len(ranks)) - np.searchsorted(ranks, ranks)
        np.add.at(self.next_ticket, ranks, 1)
        ranks, ticket = ranks[ticket < self.most_tickets], ticket[ticket < self.most_tickets]
        piece, lane = np.divmod(ticket, self.workload.lanes)
        thread = ranks * self.workload.lanes + lane
        first = self.workload.first_round[thread]
        idle = first == self.workload.first_round[thread + 1]
        begun = first[~idle] + piece[~idle] * self.workload.rounds
        return np.concatenate([begun, self._open(ranks[idle])]) if idle.any() else begun

    def _schedule(self, event: int, numbers: Numbers, delays: Seconds) -> None:
        """Schedule an event for each distinct delay."""
        if not len(numbers):
            return
        distinct, groups = delays[:1], [numbers]
        if delays.min() < delays.max():
            order = np.argsort(delays, kind="stable")
            starts = np.flatnonzero(np.diff(delays[order], prepend=-1))
            distinct, groups = delays[order][starts], np.split(numbers[order], starts[1:])
        for delay, some in zip(distinct, groups, strict=True):
            self.events_scheduled += 1
            heappush(self.events, (self.now + float(delay), self.events_scheduled, event, some))


def _runs(first: Numbers, indices: Numbers) -> tuple[Numbers, Numbers]:
    """Return first[n], first[n] + 1, ..., first[n + 1] - 1 for each n of `indices`, and for each the index of its n."""
    counts = first[indices + 1] - first[indices]
    of = np.repeat(np.arange(len(indices)), counts)
    return first[indices][of] + np.arange(len(of)) - (np.cumsum(counts) - counts)[of], of


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation."""

    seconds: float
    messages: int
    steps: int
    """Number of events at different times."""
    exact: bool
    """False for very many unsynchronized flows, of which nearly simultaneous events were handled together."""
    ends: tuple[float, ...]
    """Seconds after which each rank ends its last round; that of its start for a rank without rounds."""
    delays: tuple[Delay, ...]
    """Waits of the rank that ends last, longest first; together they last as long as the collective."""

    @property
    def bottleneck(self) -> str:
        """Sentence with the rank that ends last, and the shares of what it waits for."""
        if not self.delays:
            return "no rank waits"
        by_cause: defaultdict[Cause, list[Delay]] = defaultdict(list)
        for delay in self.delays:
            by_cause[delay.cause].append(delay)
        seconds = {cause: sum(delay.seconds for delay in delays) for cause, delays in by_cause.items()}
        shares = [
            f"{seconds[cause] / self.seconds:.0%} {cause.value}{_places(by_cause[cause])}"
            for cause in sorted(by_cause, key=lambda cause: -seconds[cause])
        ]
        return f"rank {self.ends.index(max(self.ends))} ends last, its time is {', '.join(shares)}"


def _places(delays: Sequence[Delay]) -> str:
    """Return where the delays of one cause are: the one place, or the most frequent of several."""
    if not delays[0].place:
        return ""
    if len(delays) == 1:
        return f" ({delays[0].place})"
    share = delays[0].seconds / sum(delay.seconds for delay in delays)
    return f" ({len(delays)}, most {delays[0].place}: {share:.0%})"


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
    workload = traffic(algorithm, placement.ranks, nbytes, piece_bytes)
    routes = Routes(workload, placement, network, uneven)
    play = Play(workload, routes, network, in_flight, eager, np.array(uneven.starts(placement)), max_exact_flows)
    play.run()
    return Simulated(
        play.now,
        len(workload.nbytes) * workload.pieces,
        play.steps,
        play.resolution == EXACT_RESOLUTION,
        tuple(play.ends().tolist()),
        critical_path(play),
    )


class Cause(Enum):
    """Cause of a wait."""

    LINK = "bytes on links"
    LATENCY = "latency"
    WITHIN = "messages within nodes"
    SUMS = "sums and overhead"
    LATE = "late ranks"


class Delay(NamedTuple):
    """Wait on the critical path, all of one cause and place together."""

    cause: Cause
    place: str
    """Link, such as "out of node 3", or "rank 3" of a late rank; empty for the other causes."""
    seconds: float


def critical_path(play: Play) -> tuple[Delay, ...]:
    """Return the waits of the rank that ends last in a play that has run, longest first; none if nothing was to do."""
    seconds: defaultdict[tuple[Cause, str], float] = defaultdict(float)
    workload, routes, busiest = play.workload, play.routes, play.routes.seconds(play.workload)
    rounds = int(play.ended_at.argmax()) if len(play.ended_at) else None
    while rounds is not None:  # what it has waited for, backwards from the last round
        current = rounds
        begun, ended = float(play.begun_at[current]), float(play.ended_at[current])
        messages = _messages(play, current)
        message = int(messages[play.arrived_at[messages].argmax()]) if len(messages) else -1
        arrived = float(play.arrived_at[message]) if len(messages) else begun
        seconds[Cause.SUMS, ""] += ended - max(begun, arrived)
        if arrived > begun:
            piece, of_piece = divmod(message, play.messages)
            sender, receiver = (
                int(ends[of_piece]) + piece * workload.rounds for ends in (workload.sent_in, workload.received_in)
            )
            eager = bool(play.eager[of_piece])
            current = sender if eager or play.begun_at[sender] >= play.begun_at[receiver] else receiver
            took = arrived - float(play.begun_at[current])
            if routes.within[of_piece]:
                seconds[Cause.WITHIN, ""] += took
            else:
                latency = min(took, float(play.alpha[of_piece]))
                route = routes.links[of_piece]
                seconds[Cause.LATENCY, ""] += latency
                seconds[Cause.LINK, routes.name(int(route[busiest[route].argmax()]))] += took - latency
        rounds = _before(play, current)
        if rounds is None:
            rank = int(workload.thread[current % workload.rounds]) // workload.lanes
            seconds[Cause.LATE, f"rank {rank}"] += float(play.starts[rank])
    delays = (Delay(cause, place, took) for (cause, place), took in seconds.items() if took > 0)
    return tuple(sorted(delays, key=lambda delay: -delay.seconds))


def _messages(play: Play, current: int) -> Numbers:
    workload = play.workload
    piece, round_index = divmod(current, workload.rounds)
    sent = np.arange(workload.first_sent[round_index], workload.first_sent[round_index + 1])
    received = workload.by_receiver[workload.first_received[round_index] : workload.first_received[round_index + 1]]
    return np.concatenate([sent, received]) + piece * play.messages


def _before(play: Play, current: int) -> int | None:
    """Return the round of the same rank whose end began this one; None if the rank began with it."""
    workload, round_index = play.workload, current % play.workload.rounds
    thread = int(workload.thread[round_index])
    if round_index != workload.first_round[thread]:
        return current - 1
    rank, begun = thread // workload.lanes, play.begun_at[current]
    if begun <= play.starts[rank]:
        return None
    lanes = np.arange(rank * workload.lanes, (rank + 1) * workload.lanes)
    lanes = lanes[workload.first_round[lanes + 1] > workload.first_round[lanes]]
    ends = (np.arange(workload.pieces)[:, None] * workload.rounds + workload.first_round[lanes + 1] - 1).ravel()
    return int(ends[np.flatnonzero(play.ended_at[ends] == begun)[0]])
