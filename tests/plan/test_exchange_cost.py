from dataclasses import replace

import pytest

from unisono.placement import place
from unisono.plan.exchange_cost import FREE, exchange_cost, placement_of
from unisono.plan.machines import LinkFacts, MachineFacts, NodeFacts, TopologyFacts, find_machine

MACHINE = MachineFacts("example", link=LinkFacts(1e9, latency=1e-5))


def test_the_worked_example() -> None:
    schedule, cost = exchange_cost(MACHINE, 4, 1)
    assert schedule == "direct"
    assert cost.latency == pytest.approx(20e-6)
    assert cost.per_byte == pytest.approx(1.5e-9)
    assert cost.seconds(8 << 20) == pytest.approx(12.6e-3, rel=1e-3)


def test_one_node_sends_nothing() -> None:
    assert exchange_cost(MACHINE, 1, 4) == ("", FREE)


def test_sums_take_the_time_of_memory_that_the_ranks_of_a_node_share() -> None:
    known = replace(MACHINE, node=NodeFacts(memory_bandwidth=1e10))
    costs = [exchange_cost(one, 4, 1).cost.per_byte for one in (MACHINE, known)]
    assert costs[0] < costs[1]


def test_a_narrow_wire_halves_the_bytes() -> None:
    assert exchange_cost(MACHINE, 4, 1, "bfloat16").cost.per_byte == pytest.approx(0.75e-9, rel=0.01)


def test_nodes_fill_supernodes_and_their_uplinks_are_narrow() -> None:
    uplinks = replace(MACHINE, topology=TopologyFacts(2, 8))
    assert placement_of(uplinks, 3, 2) == place([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1])
    assert exchange_cost(uplinks, 4, 1).cost.per_byte > 1.5 * exchange_cost(MACHINE, 4, 1).cost.per_byte


def test_on_all_nodes_of_a_large_machine_a_bucket_takes_longer_than_its_bytes() -> None:
    machine = find_machine("taihulight")
    cost = exchange_cost(machine, 40_960, 1).cost
    assert cost.per_byte > 2 / machine.link.bandwidth
