"""Cost of the exchange of a bucket on a machine, with the schedule that `auto` takes there, as a line over its bytes.

    seconds
       │            ╱ ● 8 MiB          latency + bytes * per_byte goes through the seconds of some sizes: those that a
       │       ╱                       run measures (`choose.MEASURED_BUCKET_BYTES`), or those of the machine's rows
       ● ╱ 512 KiB
       └──────────────── bytes

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

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

from unisono.network import Network, Uneven, estimate
from unisono.network.choice import LIBRARY, LONG_BYTES_PER_RANK, ScheduleTable, choose_by_price
from unisono.placement import Placement, place
from unisono.plan.choose import MEASURED_BUCKET_BYTES
from unisono.plan.collective_costs import CollectiveCase, refusal, schedules_of
from unisono.plan.machines import FLOAT32_WIRE, CollectiveRow, MachineFacts
from unisono.schedules import find, names
from unisono.step.costs import Cost, fit
from unisono.step.rule import AUTO
from unisono.wires import encoded_share

BYTES_OF_A_SUM = 3
"""Bytes of memory that are read and written for each byte that is summed into place."""

FREE = Cost(0.0, 0.0)
"""Cost where nothing goes over a link."""

BASES: Mapping[str, str] = {
    "measured": "measured",
    "corrected": "estimated from the link, times what was measured over its own estimate",
    "estimated": "estimated from the link",
}
"""Bases of a cost, the surest first, and words for them."""


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
        table = ScheduleTable({}, network_of(self.machine, self.ranks_per_node))
        return CollectiveCase(self.collective, placement, table, self.wire)


def exchange_cost(
    machine: MachineFacts,
    nodes: int,
    ranks_per_node: int,
    wire: str | None = None,
    sharded: bool = False,
    algorithm: str = AUTO,
) -> ExchangeCost:
    """Return the cost of an allreduce over `nodes` nodes; if `sharded`, of a reduce_scatter and an all_gather, whose
    weights are not encoded. Rows of another schedule than `algorithm` correct its estimate.

    Raises NetworkError for a machine without a bandwidth, TensorError for an unknown wire, and UsageError, as a run
    would, for an algorithm that is unknown, or cannot do it with this wire.
    """
    wires = (("reduce_scatter", wire), ("all_gather", None)) if sharded else (("allreduce", wire),)
    schedule = "" if algorithm == AUTO else algorithm
    calls = [_PricedCall(machine, nodes, ranks_per_node, *call, schedule) for call in wires]
    if nodes > 1 and algorithm not in (AUTO, LIBRARY):
        for call in calls:
            schedules_of(call.case, [algorithm])
    found = [_cost(call) for call in calls]
    cost = Cost(sum(one.cost.latency for one in found), sum(one.cost.per_byte for one in found))
    bases = [one.basis for one in found if one.basis]
    return ExchangeCost(found[0].schedule, cost, max(bases, key=list(BASES).index, default=""))


def _cost(call: _PricedCall) -> ExchangeCost:
    known, share = call.machine.collectives, encoded_share(call.wire)
    rows = rows_of(known, call.collective, call.wire or FLOAT32_WIRE, call.nodes, call.ranks)
    if rows and call.schedule in ("", rows[-1].schedule):
        cost = fit([row.bytes for row in rows], [row.seconds for row in rows])
        return ExchangeCost(rows[-1].schedule, cost, "measured")
    if call.nodes == 1:
        return ExchangeCost("", FREE)
    if rows := nearest_rows(known, call.collective, share, call.nodes, call.ranks):
        sizes, basis = tuple(row.bytes for row in rows), "corrected"
        found = [_corrected(call, row) for row in rows]
    else:
        sizes, basis = MEASURED_BUCKET_BYTES, "estimated"
        found = [_estimated(call, nbytes) for nbytes in sizes]
    return ExchangeCost(found[-1][0], fit(sizes, [seconds for _, seconds in found]), basis)


def _corrected(call: _PricedCall, row: CollectiveRow) -> tuple[str, float]:
    """Return the schedule and the estimate for the bytes of a row, times what the row took over its own estimate.

    The schedule is the call's own. Without one it is the row's, which `auto` took there, if a node has as many ranks,
    and the payload is long for all of them: on thousands of nodes `auto` takes no ring.
    """
    each = row.ranks // row.nodes
    _, before = _estimated(
        _PricedCall(call.machine, row.nodes, each, row.collective, row.wire, row.schedule), row.bytes
    )
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
    placement, network, sent = case.placement, case.table.network, int(nbytes * case.share)
    if schedule not in names() or getattr(find(schedule, placement), collective) is None:
        schedule = choose_by_price(collective, placement, network, sent).algorithm
    schedule = "direct" if refusal(case, schedule) else schedule
    uneven = uneven_of(call.machine, call.nodes)
    return schedule, float(estimate(case.algorithm(schedule), placement, network, sent, uneven=uneven))


def network_of(machine: MachineFacts, ranks_per_node: int) -> Network:
    """Return the machine's network, with the seconds of sums by the memory of a node, which its ranks share.

    Raises NetworkError for a machine without a bandwidth.
    """
    memory = machine.node.memory_bandwidth
    return machine.network(BYTES_OF_A_SUM * ranks_per_node / memory if memory else 0.0)


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
    wanted = (collective, wire, nodes, ranks)
    found = [row for row in rows if (row.collective, row.wire, row.nodes, row.ranks) == wanted]
    return sorted(found, key=lambda row: row.bytes)


def nearest_rows(
    rows: Sequence[CollectiveRow], collective: str, share: float, nodes: int, ranks: int
) -> list[CollectiveRow]:
    """Return the rows of the nearest exchange between nodes, by rising bytes; empty if there is none.

    `share` is the encoded size of what is sent, relative to float32. Of equally near ones, fewer nodes are taken.
    """

    def distance(row: CollectiveRow) -> tuple[float, float, float, int]:
        of_wire, each = encoded_share(row.wire) / share, row.ranks / row.nodes
        return abs(log(of_wire)), abs(log(row.nodes / nodes)), abs(log(each * nodes / ranks)), row.nodes

    between = [row for row in rows if row.collective == collective and row.nodes > 1]
    if not between:
        return []
    nearest = min(between, key=distance)
    return rows_of(rows, collective, nearest.wire, nearest.nodes, nearest.ranks)
