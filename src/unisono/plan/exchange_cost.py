"""Cost of the exchange of a bucket on a machine: the estimate of the schedule that `auto` takes there, as a line.

    seconds
       │            ╱ ● 8 MiB          latency + bytes * per_byte goes through the estimates of two sizes,
       │       ╱                       those that a run measures (`choose.MEASURED_BUCKET_BYTES`)
       ● ╱ 512 KiB
       └──────────────── bytes

    a byte on the wire    encoded: 0.5 of a float32 gradient's bytes with "bfloat16"
    a byte summed         3 bytes of memory: two are read, one is written; the ranks of a node share its bandwidth
    within a node         no time: machine files have no rate for it

Worked example: 4 nodes with links of 1 GB/s and 10 us. `direct` has 2 rounds, and each rank sends 1.5 n bytes: 20 us +
1.5 ns a byte, which for 8 MiB are 12.6 ms.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.choosing.priced import choose_by_price
from unisono.network import Network, Uneven, estimate
from unisono.placement import Placement, place
from unisono.plan.choose import MEASURED_BUCKET_BYTES
from unisono.plan.machines import MachineFacts
from unisono.schedules import find
from unisono.step.costs import Cost, fit
from unisono.wires import encoded_share

BYTES_OF_A_SUM = 3
"""Bytes of memory that are read and written for each byte that is summed into place."""

FREE = Cost(0.0, 0.0)
"""Cost where nothing goes over a link."""


class ExchangeCost(NamedTuple):
    """Cost of an allreduce on a machine."""

    schedule: str
    """Name of the schedule for large buckets; empty where nothing goes over a link."""
    cost: Cost
    """Seconds for bytes of float32 gradients, encoded by the wire."""


def exchange_cost(machine: MachineFacts, nodes: int, ranks_per_node: int, wire: str | None = None) -> ExchangeCost:
    """Return the cost of an allreduce over `nodes` nodes; the machine's slow links slow it down.

    Raises NetworkError for a machine without a bandwidth, and TensorError for an unknown wire.
    """
    share = encoded_share(wire)
    if nodes == 1:
        return ExchangeCost("", FREE)
    placement = placement_of(machine, nodes, ranks_per_node)
    network, uneven = network_of(machine, ranks_per_node), uneven_of(machine, nodes)
    seconds, schedule = list[float](), ""
    for nbytes in MEASURED_BUCKET_BYTES:
        sent = int(nbytes * share)
        schedule = choose_by_price("allreduce", placement, network, sent).algorithm
        algorithm = find(schedule, placement).allreduce
        seconds.append(float(estimate(algorithm, placement, network, sent, uneven=uneven)))
    return ExchangeCost(schedule, fit(MEASURED_BUCKET_BYTES, seconds))


def network_of(machine: MachineFacts, ranks_per_node: int) -> Network:
    """Return the machine's network, with the seconds of sums by the memory of a node, which its ranks share."""
    memory = machine.node.memory_bandwidth
    return machine.network(BYTES_OF_A_SUM * ranks_per_node / memory if memory else 0.0)


def uneven_of(machine: MachineFacts, nodes: int) -> Uneven:
    """Return the slow links of the first `nodes` nodes."""
    return Uneven({node: times for node, times in machine.slow_links.items() if node < nodes})


def placement_of(machine: MachineFacts, nodes: int, ranks_per_node: int) -> Placement:
    """Return the placement of ranks, numbered node by node, on nodes that fill one supernode after another."""
    supernode = machine.topology.supernode or nodes
    node_of_rank = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
    return place(node_of_rank, [node // supernode for node in node_of_rank])
