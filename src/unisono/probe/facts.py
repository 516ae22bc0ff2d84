"""Machine file of what a probe has found: medians and spreads of readings, as facts of a node.

    rate of a node in a trial     the sum over its ranks of work / seconds
    node.flops                    the best median rate of any product, forward or backward
    efficiency                    the median over the products of a kind of their rate in a step, over node.flops
    memory_bandwidth, disk        the median rate over trials and nodes
    decoding.pixels               the median rate of a rank: of one thread
    message, collective           the median over trials of the slowest pair's, or rank's, seconds

Worked example, 2 nodes of 2 ranks, a product of 1 GFLOP forward: ranks take 10, 10, 20 and 20 ms in a trial, so the
first node makes 200 GFLOP/s, the second 100; the row has their median, 150.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unisono.placement import Placement
from unisono.plan.machines import (
    DecodingFacts,
    DiskFacts,
    EfficiencyFacts,
    LinkFacts,
    MachineFacts,
    NodeFacts,
    TopologyFacts,
)
from unisono.plan.measured_rows import (
    CONVOLUTION_KIND,
    LINEAR_KIND,
    CollectiveRow,
    MessageRow,
    ProbeFacts,
    ProductRow,
)
from unisono.probe.probes import CollectiveProbe, DecodingProbe, DiskProbe, MemoryProbe, MessageProbe, ProductProbe
from unisono.probe.readings import ProbeFindings, ProbeReading, slowest
from unisono.tuning.links import Links
from unisono.tuning.topology import slow_links

DIGITS = 5
"""Digits of a value in the file: trials differ by more."""


class ProbedSite(NamedTuple):
    """Place and processors of a rank."""

    host: str
    cores: frozenset[int]
    """Cores that it may use."""
    system: NodeFacts
    """Facts that its node's system tells."""


def machine_facts(
    name: str, findings: ProbeFindings, sites: Sequence[ProbedSite], placement: Placement, date: str, version: str
) -> MachineFacts:
    """Return the machine file of a probe of these ranks; `sites` has one for each."""
    readings = _by_kind(findings.readings)
    products = tuple(_product_row(one, placement) for one in readings[ProductProbe])
    node, words = _node(products, readings[MemoryProbe], sites, placement)
    efficiency = _efficiency(products, node.flops)
    link, topology, slow, more, left_out = _network(findings.links)
    disk, disk_words = _rate(readings[DiskProbe], placement)
    pixels, decoding_words = _rank_rate(readings[DecodingProbe])
    measured = {
        **words,
        **{f"efficiency.{kind}": "median of the products' steps, over node.flops" for kind in efficiency},
        **more,
        **({"disk.bandwidth": disk_words} if disk else {}),
        **({"decoding.pixels": decoding_words} if pixels else {}),
    }
    hosts = tuple(sites[ranks[0]].host for ranks in placement.nodes)
    seconds = _rounded(findings.seconds)
    reasons = (*findings.left_out, *left_out)
    return MachineFacts(
        name,
        node,
        EfficiencyFacts(**efficiency),
        link,
        topology,
        measured=measured,
        disk=DiskFacts(disk),
        decoding=DecodingFacts(pixels),
        slow_links=slow,
        probe=ProbeFacts(date, version, hosts, placement.ranks, len(placement.nodes), seconds, reasons),
        products=products,
        messages=tuple(_message_row(one) for one in readings[MessageProbe]),
        collectives=tuple(_collective_row(one, placement) for one in readings[CollectiveProbe]),
    )


def _by_kind(readings: Sequence[ProbeReading]) -> Mapping[type[Any], list[ProbeReading]]:
    kinds = (ProductProbe, MemoryProbe, DecodingProbe, DiskProbe, MessageProbe, CollectiveProbe)
    return {kind: [one for one in readings if isinstance(one.probe, kind)] for kind in kinds}


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the range of the middle half of the values over it, both in DIGITS digits.

    >>> median_and_spread([4.0, 1.0, 2.0]), median_and_spread([1.0, 2.0, 2.5, 3.0, 100.0])
    ((2.0, 1.5), (2.5, 0.4))
    """
    ordered, median = sorted(values), statistics.median(values)
    middle = ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]
    return _rounded(median), _rounded(middle / median)


def node_rates(reading: ProbeReading, placement: Placement, index: int = 0, work: float | None = None) -> list[float]:
    """Return the rate of each node in each trial, of a call's pass `index`; nodes that took no part have none."""
    done = reading.probe.work if work is None else work
    return [
        sum(rates)
        for trial in reading.trials
        for ranks in placement.nodes
        if (rates := [done / trial[rank][index] for rank in ranks if trial[rank]])
    ]


def _product_row(reading: ProbeReading, placement: Placement) -> ProductRow:
    probe: Any = reading.probe
    forward, spread = median_and_spread(node_rates(reading, placement))
    backward, other = median_and_spread(node_rates(reading, placement, 1, 2 * probe.work))
    return ProductRow(
        probe.kind, probe.rows, probe.inner, probe.outputs, probe.kernel**2, forward, backward, max(spread, other)
    )


def _node(
    products: Sequence[ProductRow], sums: Sequence[ProbeReading], sites: Sequence[ProbedSite], placement: Placement
) -> tuple[NodeFacts, dict[str, str]]:
    """Return the facts of the median node, and what was measured of them."""
    of_nodes = [[sites[rank] for rank in ranks] for ranks in placement.nodes]
    cores = statistics.median_low(len(frozenset().union(*(site.cores for site in ranks))) for ranks in of_nodes)
    first = of_nodes[0][0].system
    node = replace(first, cores=cores, memory_bytes=min(ranks[0].system.memory_bytes for ranks in of_nodes))
    words = {"node.cores": "cores that the ranks of a node may use"} if cores else {}
    system = {"memory_bytes": "least of the nodes", "cache_bytes": "level 2 of a core", "simd_width": "widest vectors"}
    words |= {f"node.{key}": f"by the system: {what}" for key, what in system.items() if getattr(node, key)}
    if products:
        best = max(products, key=lambda row: max(row.forward, row.backward))
        shape = f"{best.kind} of ({best.rows}, {best.inner}) x ({best.inner}, {best.columns})"
        node = replace(node, flops=max(best.forward, best.backward))
        words["node.flops"] = (
            f"best of {len(products)} products: {shape}, on all ranks at once, spread {best.spread:.0%}"
        )
    bandwidth, of_sum = _rate(sums, placement)
    if bandwidth:
        node = replace(node, memory_bandwidth=bandwidth)
        words["node.memory_bandwidth"] = of_sum
    return node, words


def _efficiency(products: Sequence[ProductRow], flops: float) -> dict[str, float]:
    """Return the share of `flops` by kind, if it is below 1."""
    found = {
        kind: [row.step / flops for row in products if row.kind == kind] for kind in (CONVOLUTION_KIND, LINEAR_KIND)
    }
    shares = {kind: _rounded(statistics.median(values)) for kind, values in found.items() if values}
    return {kind: share for kind, share in shares.items() if share < 1}


def _network(
    links: Links | None,
) -> tuple[LinkFacts, TopologyFacts, dict[int, float], dict[str, str], list[str]]:
    """Return the facts of the links, what was measured of them, and what a machine file cannot hold."""
    if links is None:
        return LinkFacts(), TopologyFacts(), {}, {}, []
    network, groups = links.network, links.supernodes
    slow = {node: _rounded(factor) for node, factor in slow_links(len(groups), links.speeds).items()}
    bandwidth, spread = median_and_spread([speed for _, speed in links.speeds])
    pairs = f"{len(links.speeds)} exchanges of pairs of nodes, both ways, all at once: median {bandwidth:.4g} bytes/s"
    words = {"link.bandwidth": f"long exchanges inside supernodes; before, {pairs}, spread {spread:.0%}"}
    link = LinkFacts(_rounded(1 / float(network.beta)))
    if network.alpha:
        link = replace(link, latency=_rounded(float(network.alpha)))
        words["link.latency"] = "half the time of 4 bytes there and back, mean of a node, median of nodes"
    if network.overhead:
        link = replace(link, overhead=_rounded(float(network.overhead)))
        words["link.overhead"] = "16 messages of 1 KiB at once beside one, each way, median of nodes"
    topology, more, left_out = _topology(links, {node for node in range(len(groups)) if node not in slow})
    return link, topology, slow, words | more, left_out


def _topology(links: Links, nodes: set[int]) -> tuple[TopologyFacts, dict[str, str], list[str]]:
    """Return the supernodes of those nodes, if all are of one size and their uplinks are narrower than their links."""
    sizes = _sizes(links.supernodes[node] for node in sorted(nodes))
    if len(sizes) < 2:
        return TopologyFacts(), {}, []
    if len(set(sizes)) > 1:
        return TopologyFacts(), {}, [f"topology: supernodes of {', '.join(map(str, sizes))} nodes; a file has one size"]
    ratio = float((links.network.uplink_beta or 0.0) / links.network.beta) * sizes[0]
    words = {"topology.supernode": f"{len(sizes)} groups of nodes whose pairs were rarely slow"}
    if ratio > 1:
        words["topology.oversubscription"] = "exchanges of all nodes of a group with others, over those inside"
    return TopologyFacts(sizes[0], _rounded(ratio) if ratio > 1 else 1.0), words, []


def _sizes(groups: Iterator[int]) -> list[int]:
    numbers = list(groups)
    return [numbers.count(group) for group in sorted(set(numbers))]


def _rate(readings: Sequence[ProbeReading], placement: Placement) -> tuple[float, str]:
    """Return the median rate of a node in the largest probe, and words for it; 0 without any."""
    if not readings:
        return 0.0, ""
    return _described(readings[-1], node_rates(readings[-1], placement))


def _rank_rate(readings: Sequence[ProbeReading]) -> tuple[float, str]:
    """Return the median rate of a rank in the largest probe, and words for it; 0 without any."""
    if not readings:
        return 0.0, ""
    last = readings[-1]
    return _described(last, [last.probe.work / took[0] for trial in last.trials for took in trial if took])


def _described(reading: ProbeReading, rates: Sequence[float]) -> tuple[float, str]:
    rate, spread = median_and_spread(rates)
    return rate, f"{reading.probe.words}: median of {len(rates)}, spread {spread:.0%}"


def _message_row(reading: ProbeReading) -> MessageRow:
    probe: Any = reading.probe
    return MessageRow(probe.bytes, *median_and_spread([slowest(trial) for trial in reading.trials]))


def _collective_row(reading: ProbeReading, placement: Placement) -> CollectiveRow:
    probe: Any = reading.probe
    seconds = median_and_spread([slowest(trial) for trial in reading.trials])
    sizes = len(placement.nodes), placement.ranks
    return CollectiveRow(probe.collective, reading.schedule, probe.wire, *sizes, probe.bytes, *seconds)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
