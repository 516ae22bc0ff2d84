"""Cost of one collective on nodes that are not there: price and simulation of each schedule, beside the links' bound.

    collective, bytes ─┐
    placement          ├─▶ price      closed formula: one piece, no waits between ranks
    table or network   │   simulate   flow by flow, in the pieces of a real call; up to 2,048 ranks, also late ones
    wire              ─┘   bound      bytes that must pass the links, whatever the schedule

A wire shortens the bytes of messages, not the sums: so the network's seconds per byte of payload are scaled, and the
payload stays. Schedules that sum within nodes first send unencoded numbers there.

Worked example: an allreduce of 1 MB along a ring, 4 ranks on 4 nodes, 10 Gbit/s, bfloat16. Each rank sends 1.5 MB of
payload in 6 rounds: 0.75 MB encoded, 0.6 ms on the link, which is its bound; 6 latencies and the sums are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.network import EVEN, Network, NetworkError, Simulated, Uneven, bound, price, simulate
from unisono.network.choice import COLLECTIVES, LIBRARY, ScheduleTable
from unisono.network.pace import pace_of
from unisono.network.price import examined_ranks
from unisono.placement import Placement
from unisono.schedules import SCHEDULES, algorithm_of, check, find, names
from unisono.schedules.numbering import round_robin
from unisono.schedules.schedule import Action, Algorithm, Program, cuts_alike
from unisono.wires import WIRES, encoded_share, wire_of

WITH_WIRE = ("allreduce", "reduce_scatter", "all_gather")
"""Collectives whose messages can be encoded."""

ELEMENT_BYTES = 4
"""Bytes of an element of the payload: float32."""

MIN_EXAMINED_RANKS = 4

MAX_RANKS = 40_960
"""Largest number of ranks: TaihuLight's nodes. The price of a ring then examines the 81,918 rounds of a few ranks."""


@dataclass(frozen=True)
class CollectiveCase:
    """Collective to price: its ranks, its network, and the wire of its messages."""

    collective: str
    placement: Placement
    table: ScheduleTable
    wire: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a collective, a wire or a placement that has no price."""
        if self.collective not in COLLECTIVES:
            raise UsageError(f"there is no collective {self.collective!r}; there are {', '.join(COLLECTIVES)}")
        if self.placement.one_node:
            raise UsageError(
                f"{self.placement.ranks} ranks on one node pass no link between nodes: take more ranks, or fewer on "
                "each node; `unisono bench collectives` measures one node"
            )
        if self.wire is not None:
            WIRES.check(self.wire)
            if self.collective not in WITH_WIRE:
                raise UsageError(
                    f"a wire encodes {', '.join(WITH_WIRE)}; {self.collective} sends all bytes as they are"
                )

    @property
    def share(self) -> float:
        """Encoded bytes per byte of payload."""
        return encoded_share(self.wire)

    @property
    def cuts_must_match(self) -> bool:
        """True if the wire needs schedules that cut the payload in the same way in all rounds."""
        import torch  # noqa: PLC0415  only a wire needs PyTorch

        wire = wire_of(self.wire, torch.float32)
        return wire is not None and not wire.elementwise

    def algorithm(self, name: str) -> Algorithm:
        """Return a schedule's algorithm. Raises UsageError if there is none for the collective."""
        return algorithm_of(name, self.collective, self.placement)

    def network(self, by_node: bool = False) -> Network:
        """Return the network per byte of payload. `by_node`: messages within nodes are not encoded."""
        network, share = self.table.network, self.share
        uplink_beta = None if network.uplink_beta is None else network.uplink_beta * share
        within_beta = network.within_beta * (1 if by_node else share)
        return replace(network, beta=network.beta * share, uplink_beta=uplink_beta, within_beta=within_beta)

    def chunk_bytes(self, nbytes: int) -> int:
        """Return the bytes of all chunks of a program: an all_to_all has one for each sent and each received part."""
        return 2 * nbytes if self.collective == "all_to_all" else nbytes

    def bound(self, nbytes: int, uneven: Uneven = EVEN) -> float:
        """Return the least seconds that the links between nodes need."""
        return bound(self.collective, self.placement, self.network(), nbytes, uneven)


def check_ranks(ranks: int) -> None:
    """Raise UsageError for too many ranks, before anything is made for each of them."""
    if ranks > MAX_RANKS:
        raise UsageError(f"{ranks:,} ranks are too many to price; the limit is {MAX_RANKS:,}")


class LeftOut(NamedTuple):
    """Schedules that are not priced, and the reason."""

    schedules: tuple[str, ...]
    reason: str


class SchedulePrice(NamedTuple):
    """Price of a schedule."""

    schedule: str
    seconds: float
    rounds: int
    """Rounds of the longest lane of a rank."""
    sent_bytes: float
    """Encoded bytes that the busiest rank sends, also within its node."""


def schedules_of(case: CollectiveCase, chosen: Sequence[str] = ()) -> tuple[list[str], list[LeftOut]]:
    """Return the schedules to price, and those that are left out; without `chosen`, all that differ on these nodes.

    Raises UsageError for a chosen schedule that is unknown, or cannot do the collective with this wire.
    """
    reasons: dict[str, list[str]] = {}
    kept = []
    for name in chosen or names():
        check(name)
        if not chosen and getattr(find(name, case.placement), case.collective) is None:
            continue
        reason = refusal(case, name)
        if reason and chosen:
            raise UsageError(f"{name}: {reason}; use 'direct' or 'ring'")
        if reason := reason or (None if chosen else _duplicate(case, name)):
            reasons.setdefault(reason, []).append(name)
        else:
            kept.append(name)
    return kept, [LeftOut(tuple(some), reason) for reason, some in reasons.items()]


def refusal(case: CollectiveCase, name: str) -> str | None:
    """Return the reason why a schedule cannot do the collective with the wire."""
    algorithm = case.algorithm(name)
    if case.wire is None or not case.cuts_must_match or cuts_alike(algorithm, case.placement):
        return None
    return f"the wire {case.wire!r} encodes blocks, and the schedule cuts the payload differently in each round"


def _duplicate(case: CollectiveCase, name: str) -> str | None:
    """Return the reason why a schedule is the same as another one on these nodes."""
    placement = case.placement
    if SCHEDULES[name.partition("/")[0]].by_node and placement.ranks == len(placement.nodes):
        return "with one rank per node, the same as the schedule between nodes"
    if name.endswith("round-robin") and list(round_robin(placement)) == list(range(placement.ranks)):
        return "with these supernodes, the same as halving"
    return None


def choose_auto(case: CollectiveCase, nbytes: int) -> str:
    """Return the schedule that `auto` takes for `nbytes` bytes, or "library"."""
    sent, encoded = ceil(nbytes * case.share), case.share != 1
    name = case.table.choose(case.collective, case.placement, sent, encoded).algorithm
    differs = name != LIBRARY and case.wire is not None and case.cuts_must_match
    return "direct" if differs and not cuts_alike(case.algorithm(name), case.placement) else name


def price_schedule(case: CollectiveCase, name: str, sizes: Iterable[int]) -> list[SchedulePrice]:
    """Return the price of a schedule for each size in bytes, from the programs of up to 256 evenly spread ranks."""
    placement, algorithm = case.placement, cache(case.algorithm(name))
    examined = examined_ranks(algorithm(0, placement.ranks), placement, MIN_EXAMINED_RANKS)
    programs = {rank: algorithm(rank, placement.ranks) for rank in examined}
    by_node = programs[0].landing_remote is not None
    network = case.network(by_node)
    rounds = max(len(lane) for program in programs.values() for lane in program.lanes)
    sent = max(_sent(case, rank, program, by_node) for rank, program in programs.items())
    return [
        SchedulePrice(
            name,
            float(price(algorithm, placement, network, case.chunk_bytes(nbytes), examined)),
            rounds,
            sent * case.chunk_bytes(nbytes),
        )
        for nbytes in sizes
    ]


def _sent(case: CollectiveCase, rank: int, program: Program, by_node: bool) -> float:
    """Return the encoded bytes that a rank sends per byte of all chunks."""
    node = case.placement.node_of(rank)
    spans = [0, 0]
    for transfers in (transfers for lane in program.lanes for transfers in lane):
        for action, peer, _, span in transfers:
            if action is Action.SEND:
                spans[by_node and case.placement.node_of(peer) == node] += span
    return (spans[False] * case.share + spans[True]) / program.chunks


EAGER_BYTES = 1 << 16
"""Largest message in bytes that is sent before its receiver asks for it."""

MAX_SIMULATED_RANKS = 2048
"""Largest number of ranks all of whose messages are played."""


def simulate_schedule(case: CollectiveCase, name: str, nbytes: int, uneven: Uneven = EVEN) -> Simulated:
    """Return the simulated time of a schedule, in the pieces in which a call of `nbytes` bytes sends it.

    Raises NetworkError for more than 2,048 ranks, and for too many messages.
    """
    placement, algorithm = case.placement, case.algorithm(name)
    if placement.ranks > MAX_SIMULATED_RANKS:
        raise NetworkError(
            f"{placement.ranks:,} ranks are too many to simulate; the limit is {MAX_SIMULATED_RANKS:,}: "
            "`unisono price` takes more"
        )
    program = algorithm(0, placement.ranks)
    by_node, share = program.landing_remote is not None, case.share
    length = -(-nbytes // ELEMENT_BYTES)
    pace = pace_of(program, placement.ranks, length, ELEMENT_BYTES, case.table.network, ELEMENT_BYTES * share, by_node)
    whole = case.collective == "all_to_all"  # it is sent in one piece
    piece_bytes = case.chunk_bytes(nbytes) or 1 if whole else ELEMENT_BYTES * pace.chunk_length
    network, eager, payload = case.network(by_node), int(EAGER_BYTES / share), case.chunk_bytes(nbytes)
    return simulate(algorithm, placement, network, payload, piece_bytes, pace.in_flight, eager, uneven=uneven)
