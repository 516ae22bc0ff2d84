"""Costs of collectives on nodes that are not there: of each schedule, and of the exchange of a bucket on a machine.

**One collective**, by price and simulation, beside the links' bound:

    collective, bytes ─┐
    placement          ├─▶ price      closed formula: one piece, no waits between ranks
    table or network   │   simulate   flow by flow, in the pieces of a real call; up to 2,048 ranks, also late ones
    wire              ─┘   bound      bytes that must pass the links, whatever the schedule

A wire shortens the bytes of messages, not the sums: so the network's seconds per byte of payload are scaled, and the
payload stays. Schedules that sum within nodes first send unencoded numbers there.

Worked example: an allreduce of 1 MB along a ring, 4 ranks on 4 nodes, 10 Gbit/s, bfloat16. Each rank sends 1.5 MB of
payload in 6 rounds: 0.75 MB encoded, 0.6 ms on the link, which is its bound; 6 latencies and the sums are added.

**The exchange of a bucket**, with the schedule that `auto` takes there, is a line over its bytes, latency + bytes *
per_byte, through the seconds of the sizes that a run measures (`choose.MEASURED_BUCKET_BYTES`), or of those of the
machine's rows:

    measured     rows of the machine file for this collective and wire, on as many nodes and ranks
    corrected    estimate * (seconds of a row / estimate at that row), for each size of the nearest rows
    estimated    by the link alone: the machine file has no rows between nodes

    a byte on the wire    encoded: 0.5 of a float32 gradient's bytes with "bfloat16"
    a byte summed         3 bytes of memory: two are read, one is written; the ranks of a node share its bandwidth
    a slow link           its bytes take many times as long; rows over it contain it, as their own estimates do
    within a node         no time, unless it was measured: machine files have no rate for it

Worked example: 4 nodes with links of 1 GB/s and 10 us. `direct` has 2 rounds, and each rank sends 1.5 n bytes: 20 us +
1.5 ns a byte, which for 8 MiB are 12.6 ms. If a probe on 2 nodes took 10.1 ms for 8 MiB, where the estimate is 1.0 n
bytes, 8.41 ms, all is 1.2 times as long: 15.1 ms on 4 nodes.

Nearest rows are those of the nearest bytes on the wire, then of numbers of nodes, then of ranks of a node, by ratio:

    wanted: allreduce, bfloat16, 8 nodes x 1 rank       rows: 2 nodes, float32     further: other bytes on the wire
                                                              2 nodes, bfloat16    nearest
                                                              1 node,  float32     none: it has no link
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.formats import counted
from unisono.network import EVEN, Network, NetworkError, Simulated, Uneven, bound, estimate, price, simulate
from unisono.network.choice import COLLECTIVES, LIBRARY, LONG_BYTES_PER_RANK, ScheduleTable, choose_by_price
from unisono.network.pace import pace_of
from unisono.network.price import examined_ranks
from unisono.placement import Placement, place
from unisono.plan.choose import MEASURED_BUCKET_BYTES
from unisono.plan.machines import FLOAT32_WIRE, CollectiveRow, MachineFacts
from unisono.schedules import SCHEDULES, algorithm_of, check, find, names
from unisono.schedules.numbering import round_robin
from unisono.schedules.schedule import Action, Algorithm, Program, cuts_alike
from unisono.step.costs import FREE, Cost, fit
from unisono.step.rule import AUTO
from unisono.wires import WIRES, encoded_share, wire_of

WITH_WIRE = ("allreduce", "reduce_scatter", "all_gather")
"""Collectives whose messages can be encoded."""

ELEMENT_BYTES = 4
"""Bytes of an element of the payload: float32."""

MIN_EXAMINED_RANKS = 4

BASES: Mapping[str, str] = {
    "measured": "measured",
    "corrected": "estimated from the link, times what was measured over its own estimate",
    "estimated": "estimated from the link",
}
"""Bases of a cost, the surest first, and words for them."""


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
                f"a collective of {counted(self.placement.ranks, 'rank')} on one node passes no link between nodes: "
                "take more ranks, or fewer on each node; `unisono bench collectives` measures one node"
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

    def algorithm(self, name: str) -> Algorithm:
        """Return a schedule's algorithm. Raises UsageError if there is none for the collective."""
        return algorithm_of(name, self.collective, self.placement)

    def network(self, by_node: bool = False) -> Network:
        """Return the network per byte of payload. `by_node`: messages within nodes are not encoded."""
        network, share = self.table.network, self.share
        uplink_beta = None if network.uplink_beta is None else network.uplink_beta * share
        within_beta = network.within_beta * (1 if by_node else share)
        return replace(network, beta=network.beta * share, uplink_beta=uplink_beta, within_beta=within_beta)

    def chunk_bytes(self, program: Program, nbytes: int) -> int:
        """Return the bytes of all chunks of a program: of an all_to_all, p chunks have the payload of a rank."""
        return nbytes * program.chunks // self.placement.ranks if self.collective == "all_to_all" else nbytes

    def bound(self, nbytes: int, uneven: Uneven = EVEN) -> float:
        """Return the least seconds that the links between nodes need."""
        return bound(self.collective, self.placement, self.network(), nbytes, uneven)


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
    if case.wire is None:
        return None
    import torch  # noqa: PLC0415  only a wire needs PyTorch

    wire = wire_of(case.wire, torch.float32)
    if wire is None or wire.elementwise or cuts_alike(algorithm, case.placement):
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
    return "direct" if name != LIBRARY and case.wire is not None and refusal(case, name) else name


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
            float(price(algorithm, placement, network, case.chunk_bytes(programs[0], nbytes), examined)),
            rounds,
            sent * case.chunk_bytes(programs[0], nbytes),
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
    network, eager, payload = case.network(by_node), int(EAGER_BYTES / share), case.chunk_bytes(program, nbytes)
    piece_bytes = payload or 1 if case.collective == "all_to_all" else ELEMENT_BYTES * pace.chunk_length  # in one piece
    return simulate(algorithm, placement, network, payload, piece_bytes, pace.in_flight, eager, uneven=uneven)


class ExchangeCost(NamedTuple):
    """Cost of an exchange on a machine."""

    schedule: str
    """Name of the schedule for large buckets; empty where nothing goes over a link."""
    cost: Cost
    """Seconds for bytes of float32 gradients, encoded by the wire."""
    basis: str = ""
    """One of BASES; empty where nothing goes over a link."""


class _PricedCall(NamedTuple):
    """Collective among ranks of a machine that is to be priced."""

    machine: MachineFacts
    nodes: int
    ranks_per_node: int
    collective: str
    wire: str | None
    schedule: str = ""
    """Name of the schedule; empty where each call chooses."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def case(self) -> CollectiveCase:
        placement = placement_of(self.nodes, self.ranks_per_node, self.machine.topology.supernode)
        table = ScheduleTable({}, self.machine.network(self.ranks_per_node))
        return CollectiveCase(self.collective, placement, table, self.wire)


def exchange_cost(
    machine: MachineFacts,
    nodes: int,
    ranks_per_node: int,
    wire: str | None = None,
    sharded: bool = False,
    algorithm: str = AUTO,
) -> ExchangeCost:
    """Return the cost of an allreduce over `nodes` nodes; if `sharded`, of a reduce_scatter, a sum of flags and an
    all_gather, whose weights are not encoded. Rows of another schedule than `algorithm` correct its estimate.

    Raises NetworkError for a machine without a bandwidth, TensorError for an unknown wire, and UsageError, as a run
    would, for an algorithm that is unknown, or cannot do it with this wire.
    """
    wires = (("reduce_scatter", wire), ("all_gather", None)) if sharded else (("allreduce", wire),)
    schedule = "" if algorithm == AUTO else algorithm
    calls = [_PricedCall(machine, nodes, ranks_per_node, *call, schedule) for call in wires]
    for call in calls if nodes > 1 and algorithm not in (AUTO, LIBRARY) else ():
        schedules_of(call.case, [algorithm])
    parts = [_cost(call) for call in calls]
    latency, per_byte = (sum(each) for each in zip(*(part.cost for part in parts), strict=True))
    cost = Cost(latency * 3 / 2 if sharded else latency, per_byte)  # the flags are a third collective
    bases = [part.basis for part in parts if part.basis]
    named = LIBRARY if bases and algorithm == LIBRARY else parts[0].schedule
    return ExchangeCost(named, cost, max(bases, key=list(BASES).index, default=""))


def _cost(call: _PricedCall) -> ExchangeCost:
    known, share, alone = call.machine.collectives, encoded_share(call.wire), call.nodes == 1
    wire = FLOAT32_WIRE if alone else call.wire or FLOAT32_WIRE  # within a node nothing else is measured
    rows = rows_of(known, call.collective, wire, call.nodes, call.ranks)
    if rows and (alone or call.schedule in ("", rows[-1].schedule)):
        cost = fit([row.bytes for row in rows], [row.seconds for row in rows])
        return ExchangeCost(rows[-1].schedule, cost, "measured")
    if alone:
        return ExchangeCost("", FREE)
    if rows := nearest_rows(known, call.collective, share, call.nodes, call.ranks):
        sizes, basis = tuple(row.bytes for row in rows), "corrected"
        estimates = [_corrected(call, row) for row in rows]
    else:
        sizes, basis = MEASURED_BUCKET_BYTES, "estimated"
        estimates = [_estimated(call, nbytes) for nbytes in sizes]
    return ExchangeCost(estimates[-1][0], fit(sizes, [seconds for _, seconds in estimates]), basis)


def _corrected(call: _PricedCall, row: CollectiveRow) -> tuple[str, float]:
    """Return the schedule and the estimate for the bytes of a row, times what the row took over its own estimate.

    The schedule is the call's own. Without one it is the row's, which `auto` took there, if a node has as many ranks,
    and the payload is long for all of them: on thousands of nodes `auto` takes no ring.
    """
    each = row.ranks // row.nodes
    measured = call._replace(nodes=row.nodes, ranks_per_node=each, wire=row.wire, schedule=row.schedule)
    _, before = _estimated(measured, row.bytes)
    long = row.bytes * encoded_share(call.wire) >= LONG_BYTES_PER_RANK * call.ranks
    alike = row.schedule if long and each == call.ranks_per_node else ""
    schedule, after = _estimated(call._replace(schedule=call.schedule or alike), row.bytes)
    return schedule, after * row.seconds / before


def _estimated(call: _PricedCall, nbytes: int) -> tuple[str, float]:
    """Return the schedule of a call, if it offers the collective, else that of `auto`, and its estimated seconds.

    `auto` does not know of slow links, in a plan as in a run; the estimate does. With a wire that encodes blocks, it is
    "direct" where `auto` chose one that cuts the payload differently in each round.
    """
    collective, case, schedule = call.collective, call.case, call.schedule
    placement, ranks = case.placement, call.ranks
    if schedule not in names() or getattr(find(schedule, placement), collective) is None:
        sent = int(nbytes * case.share)
        schedule = choose_by_price(collective, placement, case.table.network, sent).algorithm
    schedule = "direct" if refusal(case, schedule) else schedule
    algorithm, uneven = case.algorithm(schedule), uneven_of(call.machine, call.nodes)
    network = case.network(by_node=algorithm(0, ranks).landing_remote is not None)
    return schedule, float(estimate(algorithm, placement, network, nbytes, uneven=uneven))


def uneven_of(machine: MachineFacts, nodes: int) -> Uneven:
    """Return the slow links of the first `nodes` nodes."""
    return Uneven({node: times for node, times in machine.slow_links.items() if node < nodes})


def placement_of(nodes: int, ranks_per_node: int, supernode: int) -> Placement:
    """Return the placement of ranks, numbered node by node, on nodes that fill one supernode of so many after another;
    0: all are in one."""
    node_of_rank = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
    return place(node_of_rank, [node // (supernode or nodes) for node in node_of_rank])


def rows_of(rows: Sequence[CollectiveRow], collective: str, wire: str, nodes: int, ranks: int) -> list[CollectiveRow]:
    """Return the rows of this exchange by rising bytes; empty if it was not measured."""
    same = [row for row in rows if (row.collective, row.wire, row.nodes, row.ranks) == (collective, wire, nodes, ranks)]
    return sorted(same, key=lambda row: row.bytes)


def nearest_rows(
    rows: Sequence[CollectiveRow], collective: str, share: float, nodes: int, ranks: int
) -> list[CollectiveRow]:
    """Return the rows of the nearest exchange between nodes, by rising bytes; empty if there is none.

    `share` is the encoded size of what is sent, relative to float32. Of equally near ones, fewer nodes are taken.
    Rows with more ranks on some nodes than on others are left out: no plan has such nodes.
    """

    def distance(row: CollectiveRow) -> tuple[float, float, float, int]:
        of_wire, each = encoded_share(row.wire) / share, row.ranks / row.nodes
        return abs(log(of_wire)), abs(log(row.nodes / nodes)), abs(log(each * nodes / ranks)), row.nodes

    between = [row for row in rows if row.collective == collective and row.nodes > 1 and row.ranks % row.nodes == 0]
    nearest = min(between, key=distance, default=None)
    return [] if nearest is None else rows_of(rows, collective, nearest.wire, nearest.nodes, nearest.ranks)
