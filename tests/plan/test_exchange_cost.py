from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.network import estimate
from unisono.placement import one_rank_per_node, place
from unisono.plan.exchange_cost import FREE, exchange_cost, nearest_rows, placement_of, rows_of, uneven_of
from unisono.plan.machines import CollectiveRow, LinkFacts, MachineFacts, NodeFacts, TopologyFacts, find_machine
from unisono.plan.planned_run import PlannedRun
from unisono.rules import BSP, Exchange
from unisono.schedules import find
from unisono.wires import encoded_share

MACHINE = MachineFacts("example", link=LinkFacts(1e9, latency=1e-5))


def test_the_worked_example() -> None:
    schedule, cost, basis = exchange_cost(MACHINE, 4, 1)
    assert basis == "estimated"
    assert schedule == "direct"
    assert cost.latency == pytest.approx(20e-6)
    assert cost.per_byte == pytest.approx(1.5e-9)
    assert cost.seconds(8 << 20) == pytest.approx(12.6e-3, rel=1e-3)


def test_one_node_sends_nothing() -> None:
    assert exchange_cost(MACHINE, 1, 4) == ("", FREE, "")


def test_sums_take_the_time_of_memory_that_the_ranks_of_a_node_share() -> None:
    known = replace(MACHINE, node=NodeFacts(memory_bandwidth=1e10))
    costs = [exchange_cost(one, 4, 1).cost.per_byte for one in (MACHINE, known)]
    assert costs[0] < costs[1]


def row(nodes: int, nbytes: int, seconds: float, **changes: Any) -> CollectiveRow:
    return replace(CollectiveRow("allreduce", "ring", "float32", nodes, nodes, nbytes, seconds, 0.0), **changes)


def test_rows_of_the_same_exchange_are_its_cost() -> None:
    rows = (row(4, 1 << 20, 0.011), row(4, 2 << 20, 0.021), row(2, 1 << 20, 1.0), row(4, 1 << 20, 1.0, wire="bfloat16"))
    schedule, cost, basis = exchange_cost(replace(MACHINE, collectives=rows), 4, 1)
    assert (schedule, basis) == ("ring", "measured")
    assert cost.latency == pytest.approx(0.001)
    assert cost.seconds(1 << 20) == pytest.approx(0.011)


def test_rows_within_a_node_are_its_cost_and_no_other_nodes() -> None:
    rows = (row(1, 1 << 20, 0.01, ranks=4), row(1, 2 << 20, 0.02, ranks=4))
    known = replace(MACHINE, collectives=rows)
    assert exchange_cost(known, 1, 4).cost.seconds(1 << 20) == pytest.approx(0.01)
    assert exchange_cost(known, 1, 2) == exchange_cost(MACHINE, 1, 2)
    assert exchange_cost(known, 4, 1) == exchange_cost(MACHINE, 4, 1)


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_the_nearest_rows_correct_an_estimate(nodes: int, wire: str | None) -> None:
    """Rows that are 1.2 times the estimate of the ring make all other numbers of nodes 1.2 times as long."""

    def of_ring(ranks: int, nbytes: int) -> float:
        network, sent = MACHINE.network(), int(nbytes * encoded_share(wire))
        placement = one_rank_per_node(ranks)
        return float(estimate(find("ring", placement).allreduce, placement, network, sent))

    sizes = (1 << 19, 8 << 20)
    rows = tuple(row(2, nbytes, 1.2 * of_ring(2, nbytes), wire=wire or "float32") for nbytes in sizes)
    schedule, cost, basis = exchange_cost(replace(MACHINE, collectives=rows), nodes, 1, wire)
    assert (schedule, basis) == ("ring", "corrected")
    for nbytes in sizes:
        assert cost.seconds(nbytes) == pytest.approx(1.2 * of_ring(nodes, nbytes), rel=1e-4)


def test_the_schedule_of_a_row_is_left_where_its_payload_is_short_for_all_ranks() -> None:
    known = replace(MACHINE, collectives=(row(2, 1 << 19, 0.001), row(2, 8 << 20, 0.01)))
    assert exchange_cost(known, 256, 1)[::2] == ("ring", "corrected")
    schedule, _, basis = exchange_cost(known, 4096, 1)
    assert basis == "corrected"
    assert schedule != "ring"


def test_a_schedule_without_a_program_corrects_the_cheapest_one() -> None:
    rows = tuple(row(2, nbytes, 1.0, schedule="library") for nbytes in (1 << 19, 8 << 20))
    schedule, _, basis = exchange_cost(replace(MACHINE, collectives=rows), 4, 1)
    assert (schedule, basis) == ("direct", "corrected")


def test_sharded_gradients_are_scattered_and_weights_are_gathered_unencoded() -> None:
    whole = exchange_cost(MACHINE, 4, 1).cost.seconds(8 << 20)
    assert exchange_cost(MACHINE, 4, 1, sharded=True).cost.seconds(8 << 20) == pytest.approx(whole, rel=0.01)
    narrow = exchange_cost(MACHINE, 4, 1, "bfloat16", sharded=True).cost.seconds(8 << 20)
    assert narrow == pytest.approx(0.75 * whole, rel=0.01)
    rows = [
        row(4, 1 << 20, seconds, collective=collective, wire=wire)
        for collective, wire, seconds in (("reduce_scatter", "bfloat16", 1.0), ("all_gather", "float32", 2.0))
    ]
    found = [
        exchange_cost(replace(MACHINE, collectives=tuple(some)), 4, 1, "bfloat16", True) for some in (rows, rows[:1])
    ]
    assert found[0].cost.seconds(1 << 20) == pytest.approx(3.0)
    assert [one.basis for one in found] == ["measured", "estimated"]


def test_a_slow_link_among_the_nodes_slows_all() -> None:
    slow = replace(MACHINE, slow_links={2: 4.0})
    assert exchange_cost(slow, 2, 1) == exchange_cost(MACHINE, 2, 1)
    assert exchange_cost(slow, 4, 1).cost.per_byte == pytest.approx(4 * exchange_cost(MACHINE, 4, 1).cost.per_byte)


def test_a_slow_link_in_measured_rows_counts_once() -> None:
    """Rows over a slow link are taken as they are; other nodes have their ratio to an estimate with that link."""
    sizes, slow = (1 << 19, 8 << 20), replace(MACHINE, slow_links={2: 4.0})

    def of_ring(nodes: int, nbytes: int) -> float:
        placement = one_rank_per_node(nodes)
        ring = find("ring", placement).allreduce
        return float(estimate(ring, placement, MACHINE.network(), nbytes, uneven=uneven_of(slow, nodes)))

    known = replace(slow, collectives=tuple(row(4, nbytes, 1.2 * of_ring(4, nbytes)) for nbytes in sizes))
    for nodes, basis in ((2, "corrected"), (4, "measured"), (8, "corrected")):
        schedule, cost, found = exchange_cost(known, nodes, 1)
        assert (schedule, found) == ("ring", basis)
        for nbytes in sizes:
            assert cost.seconds(nbytes) == pytest.approx(1.2 * of_ring(nodes, nbytes), rel=1e-4)
    assert of_ring(4, 8 << 20) > 2 * of_ring(2, 8 << 20)


def test_auto_does_not_know_of_slow_links() -> None:
    slow = replace(MACHINE, slow_links={2: 1000.0})
    assert exchange_cost(slow, 64, 1).schedule == exchange_cost(MACHINE, 64, 1).schedule


def test_a_narrow_wire_halves_the_bytes() -> None:
    assert exchange_cost(MACHINE, 4, 1, "bfloat16").cost.per_byte == pytest.approx(0.75e-9, rel=0.01)


def test_the_library_sends_gradients_as_they_are() -> None:
    run = PlannedRun(MACHINE, [], 2, BSP(Exchange("library", "bfloat16")), 64, 4)
    assert (run.wire, run.exchange) == (None, replace(run, rule=BSP(Exchange("library"))).exchange)
    assert replace(run, rule=BSP(Exchange("library", "exact"))).wire == "exact"


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_wire_of_blocks_goes_by_a_schedule_that_cuts_alike(wire: str) -> None:
    machine = find_machine("taihulight")
    assert exchange_cost(machine, 512, 1, "bfloat16").schedule == "halving/round-robin"
    assert exchange_cost(machine, 512, 1, wire) == exchange_cost(machine, 512, 1, wire, algorithm="direct")
    rows = tuple(row(2, nbytes, 0.1, schedule="halving", wire="bfloat16") for nbytes in (1 << 19, 8 << 20))
    assert exchange_cost(replace(MACHINE, collectives=rows), 4, 1, wire)[::2] == ("direct", "corrected")
    with pytest.raises(UsageError, match=f"halving: the wire '{wire}' encodes blocks.*; use 'direct' or 'ring'"):
        exchange_cost(MACHINE, 4, 1, wire, algorithm="halving")


def test_nodes_fill_supernodes_and_their_uplinks_are_narrow() -> None:
    uplinks = replace(MACHINE, topology=TopologyFacts(2, 8))
    assert placement_of(3, 2, uplinks.topology.supernode) == place([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1])
    assert exchange_cost(uplinks, 4, 1).cost.per_byte > 1.5 * exchange_cost(MACHINE, 4, 1).cost.per_byte


def test_on_all_nodes_of_a_large_machine_a_bucket_takes_longer_than_its_bytes() -> None:
    machine = find_machine("taihulight")
    cost = exchange_cost(machine, 40_960, 1).cost
    assert cost.per_byte > 2 / machine.link.bandwidth


def row_on(nodes: int, ranks: int, wire: str = "float32", nbytes: int = 1 << 20) -> CollectiveRow:
    return CollectiveRow("allreduce", "ring", wire, nodes, ranks, nbytes, 0.1, 0.0)


def test_rows_are_those_of_the_same_exchange_by_rising_bytes() -> None:
    small, large = row_on(2, 2, nbytes=8), row_on(2, 2, nbytes=16)
    others = [row_on(2, 2, "bfloat16"), row_on(2, 4), row_on(4, 4)]
    assert rows_of([large, *others, small], "allreduce", "float32", 2, 2) == [small, large]
    assert rows_of([large, small], "all_gather", "float32", 2, 2) == []


def test_the_nearest_rows_of_the_worked_example() -> None:
    rows = [row_on(2, 2), row_on(2, 2, "bfloat16"), row_on(1, 2)]
    assert nearest_rows(rows, "allreduce", 0.5, 8, 8) == [rows[1]]
    assert nearest_rows(rows, "allreduce", 1.0, 8, 8) == [rows[0]]
    assert nearest_rows(rows[2:], "allreduce", 1.0, 8, 8) == []


def test_bytes_on_the_wire_come_before_nodes_and_these_before_ranks_of_a_node() -> None:
    near, far, dense = row_on(4, 4, "bfloat16"), row_on(2, 2), row_on(4, 8)
    assert nearest_rows([near, far], "allreduce", 1.0, 4, 4) == [far]
    assert nearest_rows([far, dense], "allreduce", 1.0, 4, 4) == [dense]
    assert nearest_rows([dense, row_on(4, 4)], "allreduce", 1.0, 4, 4) == [row_on(4, 4)]
    assert nearest_rows([row_on(8, 8), row_on(2, 2)], "allreduce", 1.0, 4, 4) == [row_on(2, 2)]
    assert nearest_rows([row_on(2, 2)], "all_gather", 1.0, 4, 4) == []
