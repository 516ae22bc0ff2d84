"""Machine file of what a probe has found: medians and spreads of readings, as facts of a node.

    rate of a node in a trial     the sum over its ranks of work / seconds
    node.flops                    the best median rate of any product, forward or backward
    efficiency                    the median over the products of a kind of their rate in a step, over node.flops
    memory_bandwidth, disk        the median rate over trials and nodes
    to_host, to_device            the same, of the devices of a node's ranks together; accelerators are their number
    decoding.pixels               the median rate of a rank: of one thread
    collective                    the median over trials of the slowest rank's seconds
    choices                       the measured network, and the rows of `unisono tune`

Worked example, 2 nodes of 2 ranks, a product of 1 GFLOP forward: ranks take 10, 10, 20 and 20 ms in a trial, so the
first node makes 200 GFLOP/s, the second 100; the row has their median, 150.

What a rank's system tells of its place is read from the files of Linux; what a file does not say stays unknown:

    /proc/meminfo                         MemTotal:  8000000 kB    ─▶ memory_bytes, or the limit of a container
    /proc/cpuinfo                         flags: ... avx2 ...      ─▶ simd_width: float32 numbers of a register
    /sys/devices/system/cpu/cpu0/cache/   level 2, 1024K           ─▶ cache_bytes: of a thread's blocks
"""

from __future__ import annotations

import re
import socket
import statistics
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.device import memory_of
from unisono.launch import available_cores
from unisono.measure.links import OVERHEAD_MESSAGES, SMALL_BYTES, Links, slow_links
from unisono.measure.probes import ProbeFindings, ProbeReading, slowest
from unisono.network.choice import ChoiceRow, ChoiceTables, SupernodeRow
from unisono.placement import Placement
from unisono.plan.machines import (
    CONVOLUTION_KIND,
    FLOAT32,
    LINEAR_KIND,
    TABLES,
    CollectiveRow,
    MachineFacts,
    NodeFacts,
    ProbeFacts,
    ProductRow,
    machine_text,
)
from unisono.processor import HOST
from unisono.world import World

RATES = {
    "memory": "node.memory_bandwidth",
    "device_memory": "node.device_bandwidth",
    "to_host": "node.to_host",
    "to_device": "node.to_device",
    "disk": "disk.bandwidth",
    "decoding": "decoding.pixels",
}
"""Key of the rate of a node, or in decoding of a rank, by the kind of its probes."""

DIGITS = 5
"""Digits of a value in the file: trials differ by more."""


Values = dict[str, tuple[float, str]]
"""Values of the tables by their key, "link.latency", each with how it was measured, in the words of [measured]."""


def machine_facts(
    findings: ProbeFindings, sites: Sequence[ProbedSite], placement: Placement, date: str, version: str, name: str = ""
) -> MachineFacts:
    """Return the machine file of findings on these ranks; `sites` has one for each.

    An empty `name` becomes the hosts and ranks.
    """
    readings, links = defaultdict[str, list[ProbeReading]](list), findings.links
    for reading in findings.readings:
        readings[reading.probe.kind].append(reading)
    products = tuple(_product_row(reading, placement) for reading in readings["product"])
    hosts = tuple(sites[ranks[0]].host for ranks in placement.nodes)
    ratios = {} if links is None else slow_links(len(links.supernodes), links.speeds)
    slow = {node: _rounded(ratio) for node, ratio in ratios.items()}
    sizes = () if links is None else _supernode_sizes(links, slow)
    values = {
        **_system(sites, placement),
        **_computing(products),
        **_rates(readings, placement),
        **({} if links is None else _links(links) | _topology(links, sizes)),
    }
    tables = defaultdict[str, dict[str, Any]](dict)
    for key, (value, _) in values.items():
        table, _, name_of_value = key.partition(".")
        tables[table][name_of_value] = value
    reasons = (*findings.left_out, *_left_out(sizes, hosts))
    seconds = _rounded(findings.seconds)
    return MachineFacts(
        name or f"{sites[0].host}, nodes: {len(hosts)}, ranks: {placement.ranks}",
        **{table: kind(**tables[table]) for table, kind in TABLES.items() if table != "probe"},
        measured={key: method for key, (_, method) in values.items()},
        slow_links=slow,
        choices=choice_tables(links, hosts, findings.rows),
        probe=ProbeFacts(date, version, hosts, placement.ranks, len(hosts), seconds, reasons),
        products=products,
        collectives=tuple(_collective_row(reading, placement) for reading in readings["collective"]),
    )


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
    kind, rows, inner, columns, kernel, dtype = reading.probe.row
    forward, spread = median_and_spread(node_rates(reading, placement))
    backward, backward_spread = median_and_spread(node_rates(reading, placement, 1, 2 * reading.probe.work))
    return ProductRow(kind, rows, inner, columns, kernel, forward, backward, max(spread, backward_spread), dtype)


def _system(sites: Sequence[ProbedSite], placement: Placement) -> Values:
    """Return what the systems tell of the median node."""
    of_nodes = [[sites[rank] for rank in ranks] for ranks in placement.nodes]
    system = of_nodes[0][0].system
    cores = statistics.median_low(len(frozenset().union(*(site.cores for site in ranks))) for ranks in of_nodes)
    memory = min(ranks[0].system.memory_bytes for ranks in of_nodes)
    devices = statistics.median_low(len({site.device for site in ranks} - {""}) for ranks in of_nodes)
    of_device = min(site.system.device_memory_bytes for site in sites)
    values: Values = {
        "node.cores": (cores, "cores that the ranks of a node may use"),
        "node.accelerators": (devices, f"devices of the ranks of a node: {of_nodes[0][0].device}, ..."),
        "node.device_memory_bytes": (of_device, "by PyTorch: least of the accelerators"),
        "node.memory_bytes": (memory, "by the system: least of the nodes"),
        "node.cache_bytes": (system.cache_bytes, "by the system: level 2 of a core"),
        "node.simd_width": (system.simd_width, "by the system: widest vectors"),
    }
    return {key: (value, method) for key, (value, method) in values.items() if value}


def _computing(products: Sequence[ProductRow]) -> Values:
    """Return a node's best rate in float32, and the share of it that products of a kind reach, if it is below 1."""
    products = [row for row in products if row.dtype == FLOAT32]
    if not products:
        return {}
    best = max(products, key=lambda row: max(row.forward, row.backward))
    flops, shape = max(best.forward, best.backward), f"({best.rows}, {best.inner}) x ({best.inner}, {best.columns})"
    method = f"best of {len(products)} products: {best.kind} of {shape}, on all ranks at once, spread {best.spread:.0%}"
    values: Values = {"node.flops": (flops, method)}
    for kind in (CONVOLUTION_KIND, LINEAR_KIND):
        steps = [row.step / flops for row in products if row.kind == kind]
        if steps and (share := _rounded(statistics.median(steps))) < 1:
            values[f"efficiency.{kind}"] = (share, "median of the products' steps, over node.flops")
    return values


def _rates(readings: Mapping[str, Sequence[ProbeReading]], placement: Placement) -> Values:
    """Return the median rates of memory, disk and decoding in the largest probe of each."""
    values = Values()
    for kind, key in RATES.items():
        for largest in readings[kind][-1:]:
            if kind == "decoding":  # of each rank
                rates = [largest.probe.work / took[0] for trial in largest.trials for took in trial if took]
            else:
                rates = node_rates(largest, placement)
            rate, spread = median_and_spread(rates)
            method = f"{largest.probe.label}: median of {len(rates)}, spread {spread:.0%}"
            values[key] = (rate, method)
    return values


def _links(links: Links) -> Values:
    """Return the costs of a message; latency and overhead only if they were measured as more than 0."""
    network, (bandwidth, spread) = links.network, median_and_spread([speed for _, speed in links.speeds])
    pairs = f"{len(links.speeds)} exchanges of pairs of nodes, both ways, all at once"
    long = f"long exchanges inside supernodes; before, {pairs}: median {bandwidth:.4g} bytes/s, spread {spread:.0%}"
    short = "half the time of 4 bytes there and back, mean of a node, median of nodes"
    many = f"{OVERHEAD_MESSAGES} messages of {SMALL_BYTES >> 10} KiB at once beside one, each way, median of nodes"
    values: Values = {
        "link.bandwidth": (1 / float(network.beta), long),
        "link.latency": (float(network.alpha), short),
        "link.overhead": (float(network.overhead), many),
    }
    return {key: (_rounded(value), method) for key, (value, method) in values.items() if value}


def _supernode_sizes(links: Links, slow: Container[int]) -> tuple[int, ...]:
    """Return the nodes of each supernode, without those whose own links are slow."""
    numbers = [group for node, group in enumerate(links.supernodes) if node not in slow]
    return tuple(numbers.count(group) for group in sorted(set(numbers)))


def _topology(links: Links, sizes: Sequence[int]) -> Values:
    """Return the supernodes, if there are several of one size, and how much narrower their uplinks are than links."""
    if len(sizes) < 2 or len(set(sizes)) > 1:
        return {}
    values: Values = {"topology.supernode": (sizes[0], f"{len(sizes)} groups of nodes whose pairs were rarely slow")}
    if (ratio := float((links.network.uplink_beta or 0.0) / links.network.beta) * sizes[0]) > 1:
        method = "exchanges of all nodes of a group with others, over those inside"
        values["topology.oversubscription"] = (_rounded(ratio), method)
    return values


def choice_tables(links: Links | None, hosts: Sequence[str], rows: Mapping[str, tuple[ChoiceRow, ...]]) -> ChoiceTables:
    """Return the tables of choices: the rows by collective, the network, and the hosts of each supernode, by the host
    name of each node. Without `links` of several nodes there is no network.
    """
    tables: dict[str, Any] = dict(rows)
    if links is None:
        return ChoiceTables(**tables)
    members: defaultdict[int, list[str]] = defaultdict(list)
    for supernode, host in zip(links.supernodes, hosts, strict=True):
        members[supernode].append(host)
    told_apart = len(members) > 1 and len(set(hosts)) == len(hosts)
    supernodes = [SupernodeRow(tuple(names)) for _, names in sorted(members.items())] if told_apart else []
    return ChoiceTables(**tables, network=links.network, supernode=tuple(supernodes))


def _left_out(sizes: Sequence[int], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the reasons for which supernodes are not in the file."""
    if len(set(sizes)) > 1:
        yield f"topology: supernodes of {', '.join(map(str, sizes))} nodes; a file has one size"
    if len(sizes) > 1 and len(set(hosts)) < len(hosts):  # a table cannot tell them apart
        yield "choices.supernode: several nodes have the same host name"


def _collective_row(reading: ProbeReading, placement: Placement) -> CollectiveRow:
    collective, wire, nbytes = reading.probe.row
    seconds = median_and_spread([slowest(trial) for trial in reading.trials])
    return CollectiveRow(collective, reading.schedule, wire, len(placement.nodes), placement.ranks, nbytes, *seconds)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def file_of(machine: MachineFacts) -> str:
    """Return the text of the machine file that `unisono probe` and `unisono tune` write."""
    probe = machine.probe
    head = f"# Measured with Unisono {probe.version}, on {probe.date}; ranks: {probe.ranks}, nodes: {probe.nodes}, "
    head += f"{probe.seconds:.0f} s.\n# [measured] says how each value was found; values that are not known are left "
    head += "out. docs/planning.md describes\n# the rows, src/unisono/network/default.toml those of [choices], "
    return f"{head}which may be edited.\n\n{machine_text(machine)}"


SIMD_WIDTHS: Mapping[str, int] = {"avx512f": 16, "avx": 8, "sse": 4, "asimd": 4}
"""float32 numbers of the widest register, by the flag of a processor; the first that it has counts."""

BLOCK_CACHE_LEVEL = "2"
"""Level of the cache that holds a thread's blocks: the largest that a core has for itself."""

UNITS: Mapping[str, int] = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class ProbedSite(NamedTuple):
    """Place and processors of a rank."""

    host: str
    cores: frozenset[int]
    """Cores that it may use."""
    system: NodeFacts
    """Facts that its node's system tells."""
    device: str = ""
    """Device that it computes on; empty for the processor."""


def sites_of(world: World, device: torch.device) -> list[ProbedSite]:
    """Return the place of each rank, on all ranks; `device` is this rank's."""
    name = "" if device.type == HOST else str(device)
    system = replace(read_system(), device_memory_bytes=memory_of(device))
    return world.all_gather_object(ProbedSite(socket.gethostname(), available_cores(), system, name))


def read_system(root: Path = Path("/")) -> NodeFacts:
    """Return what the files below `root` tell of this node, all but its cores."""
    memory = memory_bytes(_read(root / "proc/meminfo"), _read(root / "sys/fs/cgroup/memory.max"))
    folders = sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*"))
    caches = [tuple(_read(folder / name).strip() for name in ("level", "type", "size")) for folder in folders]
    sizes = [cache_bytes(size) for level, kind, size in caches if level == BLOCK_CACHE_LEVEL and kind != "Instruction"]
    width = simd_width(_read(root / "proc/cpuinfo"))
    return NodeFacts(cache_bytes=max(sizes, default=0), simd_width=width, memory_bytes=memory)


def memory_bytes(meminfo: str, limit: str = "") -> float:
    """Return the bytes of memory by the text of /proc/meminfo, at most the `limit` of a control group; 0: not known."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    total = float(match[1]) * 1024 if match else 0.0
    return min(total, float(limit)) if limit.strip().isdecimal() and total else total


def cache_bytes(size: str) -> int:
    """Return the bytes of a size such as 1024K; 0 for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)", size)
    return int(match[1]) * UNITS.get(match[2], 1) if match else 0


def simd_width(cpuinfo: str) -> int:
    """Return the float32 numbers of a vector register by the text of /proc/cpuinfo; 0: not known."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return next((width for flag, width in SIMD_WIDTHS.items() if flag in flags), 0)


def _read(path: Path) -> str:
    """Return the text of a file; empty where there is none, or it may not be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
