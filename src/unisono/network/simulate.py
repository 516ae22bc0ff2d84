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
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from unisono.network.links import EVEN, Network, Uneven
from unisono.network.play import EXACT_RESOLUTION, MAX_EXACT_FLOWS, Play
from unisono.network.traffic import Numbers, Routes, traffic
from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm


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
        words = [
            f"{seconds[cause] / self.seconds:.0%} {cause.value}{_places(by_cause[cause])}"
            for cause in sorted(by_cause, key=lambda cause: -seconds[cause])
        ]
        return f"rank {self.ends.index(max(self.ends))} ends last, its time is {', '.join(words)}"


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
    every = traffic(algorithm, placement.ranks, nbytes, piece_bytes)
    routes = Routes(every, placement, network, uneven)
    play = Play(every, routes, network, in_flight, eager, np.array(uneven.starts(placement)), max_exact_flows)
    play.run()
    return Simulated(
        play.now,
        len(every.nbytes) * every.pieces,
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
    if len(play.ended_at):
        _walk(play, int(play.ended_at.argmax()), seconds)
    found = (Delay(cause, place, took) for (cause, place), took in seconds.items() if took > 0)
    return tuple(sorted(found, key=lambda delay: -delay.seconds))


def _walk(play: Play, last: int, seconds: defaultdict[tuple[Cause, str], float]) -> None:
    """Follow what each round waited for, backwards from round `last`; add up seconds by cause and place."""
    every, routes, busiest = play.every, play.routes, play.routes.seconds(play.every)
    rounds: int | None = last
    while rounds is not None:
        current = rounds
        begun, ended = float(play.begun_at[current]), float(play.ended_at[current])
        messages = _messages(play, current)
        message = int(messages[play.arrived_at[messages].argmax()]) if len(messages) else -1
        arrived = float(play.arrived_at[message]) if len(messages) else begun
        seconds[Cause.SUMS, ""] += ended - max(begun, arrived)
        if arrived > begun:
            piece, of_piece = divmod(message, play.messages)
            sender, receiver = (
                int(ends[of_piece]) + piece * every.rounds for ends in (every.sent_in, every.received_in)
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
            rank = int(every.thread[current % every.rounds]) // every.lanes
            seconds[Cause.LATE, f"rank {rank}"] += float(play.starts[rank])


def _messages(play: Play, current: int) -> Numbers:
    every = play.every
    piece, number = divmod(current, every.rounds)
    sent = np.arange(every.first_sent[number], every.first_sent[number + 1])
    received = every.by_receiver[every.first_received[number] : every.first_received[number + 1]]
    return np.concatenate([sent, received]) + piece * play.messages


def _before(play: Play, current: int) -> int | None:
    """Return the round of the same rank whose end began this one; None if the rank began with it."""
    every, number = play.every, current % play.every.rounds
    thread = int(every.thread[number])
    if number != every.first_round[thread]:
        return current - 1
    rank, begun = thread // every.lanes, play.begun_at[current]
    if begun <= play.starts[rank]:
        return None
    lanes = np.arange(rank * every.lanes, (rank + 1) * every.lanes)
    lanes = lanes[every.first_round[lanes + 1] > every.first_round[lanes]]
    ends = (np.arange(every.pieces)[:, None] * every.rounds + every.first_round[lanes + 1] - 1).ravel()
    return int(ends[np.flatnonzero(play.ended_at[ends] == begun)[0]])
