"""Readings become a machine file: medians and spreads of nodes, in one process, for any number of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unisono.measure.facts import (
    ProbedSite,
    cache_bytes,
    file_of,
    machine_facts,
    memory_bytes,
    node_rates,
    read_system,
    simd_width,
)
from unisono.measure.links import Links
from unisono.measure.probes import (
    Probe,
    ProbeFindings,
    ProbeReading,
    collective_probe,
    copy_probe,
    decoding_probe,
    disk_probe,
    memory_probe,
    product_probe,
)
from unisono.network import Network
from unisono.network.choice import SupernodeRow
from unisono.placement import one_rank_per_node, place
from unisono.plan.machines import CollectiveRow, MachineFacts, NodeFacts, ProductRow, parse_machine

PLACEMENT = place([0, 0, 1, 1])
SYSTEM = NodeFacts(cache_bytes=1 << 20, simd_width=16, memory_bytes=8e9)
SITES = [ProbedSite(host, frozenset({core}), SYSTEM) for host, core in (("a", 0), ("a", 1), ("b", 0), ("b", 1))]


def reading(probe: Probe, *trials: tuple[tuple[float, ...], ...], schedule: str = "") -> ProbeReading:
    return ProbeReading(probe, trials, 0.0, schedule)


SMALL, LARGE = product_probe("linear", 10, 5000, 10_000), product_probe("convolution", 1, 64, 128, 10, 3)
READINGS = (
    reading(SMALL, ((0.01, 0.02), (0.01, 0.02), (0.02, 0.04), (0.02, 0.04))),
    reading(LARGE, ((0.01, 0.04),) * 4, ((0.01, 0.04),) * 4, ((0.02, 0.04),) * 4),
    reading(memory_probe(1000), ((1e-6,),) * 4),
    reading(decoding_probe(10, 10), ((1e-6,), (1e-6,), (1e-6,), (4e-6,))),
    reading(disk_probe(1000), ((1e-3,), (), (1e-3,), ())),
    reading(disk_probe(9000), ((1e-3,), (), (3e-3,), ())),
    reading(collective_probe("allreduce", "bfloat16", 4096), ((1.0,), (2.0,), (1.0,), (1.0,)), schedule="ring"),
)
SPEEDS = (((0, 1), 1e6), ((0, 1), 1e6))
LINKS = Links(Network(1e-5, 1e-6, overhead=2e-6), (0, 0), SPEEDS)


def facts(links: Links | None = LINKS, readings: tuple[ProbeReading, ...] = READINGS) -> MachineFacts:
    findings = ProbeFindings(links, readings, ("disk: full",), 12.3456)
    return machine_facts(findings, SITES, PLACEMENT, "2026-01-02", "1.0", "ours")


def test_the_worked_example() -> None:
    """1 GFLOP in 10 and 20 ms: the nodes make 200 and 100 GFLOP/s, and 150 is the median."""
    assert node_rates(READINGS[0], PLACEMENT) == [2e11, 1e11]
    assert facts().products[0] == ProductRow(
        "linear", 10, 5000, 10_000, 1, 1.5e11, 1.5e11, pytest.approx(2 / 3, rel=1e-4)
    )


def test_a_node_has_the_best_rate_and_efficiencies_are_shares_of_it() -> None:
    machine = facts()
    assert machine.node == replace(SYSTEM, cores=2, flops=1.5e11, memory_bandwidth=6e9)
    assert machine.products[1].kernel == 9
    assert machine.efficiency.linear == 1
    assert machine.efficiency.convolution == pytest.approx(machine.products[1].step / 1.5e11, rel=1e-4)


def test_disks_are_read_by_one_rank_of_a_node_and_images_decoded_by_each() -> None:
    machine = facts()
    assert machine.disk.bandwidth == (9e6 + 3e6) / 2  # the largest file
    assert machine.decoding.pixels == 1e8
    assert machine.measured["disk.bandwidth"].startswith("file of 0 MiB: median of 2")


def test_accelerators_are_those_of_the_ranks_of_a_node() -> None:
    """Their rates are those of all ranks together; a node's FLOP/s are those of float32."""
    device, taken = torch.device("cuda"), ((1e-3,),) * 4
    narrow = product_probe("linear", 10, 5000, 10_000, dtype="bfloat16", device=device)
    readings = (
        READINGS[0],
        reading(narrow, ((0.001, 0.002),) * 4),
        *(reading(copy_probe(kind, 1000, device), taken) for kind in ("to_host", "to_device")),
        reading(memory_probe(1000, device), taken),
    )

    def found(*devices: str) -> MachineFacts:
        systems = (replace(SYSTEM, device_memory_bytes=size) for size in (4e9, 3e9, 4e9, 4e9))
        named = zip(SITES, devices, systems, strict=True)
        sites = [site._replace(device=name, system=system) for site, name, system in named]
        return machine_facts(ProbeFindings(None, readings, (), 1.0), sites, PLACEMENT, "2026-01-02", "1.0")

    machine = found("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert machine.node.accelerators == 2
    assert found("cuda:0", "cuda:0", "cuda:0", "cuda:0").node.accelerators == 1
    assert (machine.node.to_host, machine.node.to_device, machine.node.device_bandwidth) == (2e6, 2e6, 6e6)
    assert machine.node.device_memory_bytes == 3e9
    assert machine.node.flops == 1.5e11
    assert [row.dtype for row in machine.products] == ["float32", "bfloat16"]
    assert [row.forward for row in machine.in_precision("auto").products] == [2e12]
    assert [row.forward for row in machine.in_precision("float32").products] == [1.5e11]
    assert facts().in_precision("bfloat16") == facts()
    assert parse_machine(tomllib.loads(file_of(machine)), "x.toml") == machine


def test_rows_have_the_slowest_of_each_trial() -> None:
    machine = facts()
    assert machine.collectives == (CollectiveRow("allreduce", "ring", "bfloat16", 2, 4, 4096, 2.0, 0.0),)


def test_the_file_says_where_and_what_was_not_measured() -> None:
    probe = facts().probe
    assert (probe.hosts, probe.ranks, probe.nodes, probe.seconds) == (("a", "b"), 4, 2, 12.346)
    assert probe.left_out == ("disk: full",)


def test_it_is_read_as_it_was_found_with_and_without_readings() -> None:
    for machine in (facts(), facts(None, ()), facts(None, READINGS[:1])):
        assert parse_machine(tomllib.loads(file_of(machine)), "x.toml") == machine


def four(speeds: dict[tuple[int, int], float], groups: tuple[int, ...], uplink: float | None) -> MachineFacts:
    network = Network(1e-5, 1e-6, uplink_beta=uplink)
    findings = ProbeFindings(Links(network, groups, tuple(speeds.items())), (), (), 1.0)
    return machine_facts(findings, SITES, one_rank_per_node(4), "2026-01-02", "1.0", "ours")


PAIRS = [(node, peer) for node in range(4) for peer in range(node + 1, 4)]


def test_a_slow_link_is_no_supernode() -> None:
    machine = four({pair: 2.5e5 if 3 in pair else 1e6 for pair in PAIRS}, (0, 0, 0, 1), 4e-6)
    assert machine.slow_links == {3: 4.0}
    assert (machine.topology.supernode, machine.topology.oversubscription) == (0, 1)


def test_supernodes_of_one_size_have_an_uplink() -> None:
    speeds = {pair: 1e6 if pair in ((0, 1), (2, 3)) else 2.5e5 for pair in PAIRS}
    machine = four(speeds, (0, 0, 1, 1), 2e-6)
    assert (machine.topology.supernode, machine.topology.oversubscription) == (2, 4)
    assert machine.slow_links == {}
    assert machine.network().uplink_beta == pytest.approx(2e-6)
    assert machine.link.bandwidth == 1e6


def test_supernodes_of_unlike_sizes_are_left_out_with_a_reason() -> None:
    machine = four(dict.fromkeys(PAIRS, 1e6), (0, 0, 0, 1), 2e-6)
    assert machine.topology.supernode == 0
    assert machine.probe.left_out[0] == "topology: supernodes of 3, 1 nodes; a file has one size"
    assert machine.choices.network.uplink_beta == 2e-6


def test_choices_have_the_hosts_of_supernodes_unless_two_hosts_have_one_name() -> None:
    findings = ProbeFindings(Links(LINKS.network, (0, 1), SPEEDS), (), (), 1.0)
    other = machine_facts(findings, SITES, PLACEMENT, "2026-01-02", "1.0")
    assert other.choices.supernode == (SupernodeRow(("a",)), SupernodeRow(("b",)))
    assert other.name == "a, nodes: 2, ranks: 4"
    same = machine_facts(findings, [SITES[0]] * 4, PLACEMENT, "2026-01-02", "1.0")
    assert same.choices.supernode == ()
    assert same.probe.left_out == ("choices.supernode: several nodes have the same host name",)


MEMINFO = "MemFree:  1 kB\nMemTotal:       24684100 kB\n"


def test_memory_is_that_of_the_system_or_of_its_control_group() -> None:
    assert memory_bytes(MEMINFO) == memory_bytes(MEMINFO, "max\n") == 24684100 * 1024
    assert memory_bytes(MEMINFO, "1000\n") == 1000
    assert memory_bytes("", "1000") == 0


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("flags\t\t: fpu sse avx avx2 avx512f", 16),
        ("flags\t\t: fpu sse avx avx2", 8),
        ("flags : sse sse2", 4),
        ("Features\t: fp asimd", 4),
        ("isa : rv64", 0),
    ],
)
def test_vectors_are_the_widest_of_the_flags(line: str, width: int) -> None:
    assert simd_width(f"processor : 0\n{line}\n") == width


def test_sizes_of_caches() -> None:
    assert [cache_bytes(size) for size in ("1024K", "2M", "512", "", "big")] == [1 << 20, 2 << 20, 512, 0, 0]


def test_a_root_with_files_and_one_without(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    for index, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("2", "Unified", "1M"), ("3", "Unified", "32M"))
    ):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert read_system(tmp_path) == NodeFacts(cache_bytes=1 << 20, memory_bytes=24684100 * 1024)
    assert read_system(tmp_path / "nowhere") == NodeFacts()
