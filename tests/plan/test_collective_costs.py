from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.network import DEFAULT, NetworkError, Uneven, estimate, price, shaped
from unisono.network.choice import COLLECTIVES, ScheduleTable, read_table
from unisono.network.simulate import Cause
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.plan.collective_costs import (
    CollectiveCase,
    choose_auto,
    exchange_cost,
    nearest_rows,
    placement_of,
    price_schedule,
    rows_of,
    schedules_of,
    simulate_schedule,
    uneven_of,
)
from unisono.plan.machines import CollectiveRow, LinkFacts, MachineFacts, NodeFacts, TopologyFacts, find_machine
from unisono.plan.planned_run import PlannedRun
from unisono.rules import BSP, Exchange
from unisono.schedules import find, names
from unisono.step.costs import FREE
from unisono.wires import encoded_share

BYTES = 1 << 20


def case(placement: Placement, collective: str = "allreduce", wire: str | None = None) -> CollectiveCase:
    return CollectiveCase(collective, placement, ScheduleTable({}, shaped(10e9, 4, 2)), wire)


def test_the_worked_example() -> None:
    plain = CollectiveCase("allreduce", one_rank_per_node(4), ScheduleTable({}, shaped(10e9)), "bfloat16")
    (priced,) = price_schedule(plain, "ring", [1_000_000])
    assert (priced.rounds, priced.sent_bytes) == (6, 750_000)
    assert plain.bound(1_000_000) == pytest.approx(0.6e-3)
    sums = 750_000 * float(plain.table.network.gamma)
    assert priced.seconds == pytest.approx(0.6e-3 + 6 * float(plain.table.network.alpha) + sums)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_schedules_of_the_collective_are_priced_or_left_out(collective: str) -> None:
    single, several = case(one_rank_per_node(8), collective), case(regular(2, 4, 2), collective)
    offered = {name for name in names() if getattr(find(name, several.placement), collective) is not None}
    for each in (single, several):
        kept, left_out = schedules_of(each)
        assert set(kept) | {name for some in left_out for name in some.schedules} == offered
    assert schedules_of(several) == ([name for name in names() if name in offered], [])
    assert not any("/round" in name or name.startswith(("hier", "leader")) for name in schedules_of(single)[0])


def test_chosen_schedules_are_kept() -> None:
    assert schedules_of(case(one_rank_per_node(8)), ["leader", "ring"]) == (["leader", "ring"], [])


@pytest.mark.parametrize("name", ["ring", "halving", "direct"])
def test_sizes_have_the_price_of_the_schedule(name: str) -> None:
    here = case(regular(2, 4, 1))
    algorithm = find(name, here.placement).allreduce
    seconds = [row.seconds for row in price_schedule(here, name, [4096, BYTES])]
    assert seconds == [float(price(algorithm, here.placement, here.table.network, n)) for n in (4096, BYTES)]


def test_long_programs_are_examined_on_fewer_ranks() -> None:
    many = CollectiveCase("allreduce", one_rank_per_node(1024), ScheduleTable({}, shaped(10e9)))
    (priced,) = price_schedule(many, "ring", [BYTES])
    assert priced.seconds == pytest.approx(
        float(price(many.algorithm("ring"), many.placement, shaped(10e9), BYTES, [0]))
    )


def test_a_wire_halves_the_bytes_on_links_but_not_the_sums_nor_those_within_nodes() -> None:
    plain, narrow = (case(regular(2, 2, 2), wire=wire) for wire in (None, "bfloat16"))
    assert narrow.bound(BYTES) == pytest.approx(plain.bound(BYTES) / 2)
    assert narrow.network().gamma == plain.network().gamma
    assert narrow.network(by_node=True).within_beta == plain.network().within_beta
    sent = [price_schedule(priced_case, "ring", [BYTES])[0].sent_bytes for priced_case in (plain, narrow)]
    assert sent[1] == sent[0] / 2
    by_node = [price_schedule(priced_case, "hierarchical", [BYTES])[0].sent_bytes for priced_case in (plain, narrow)]
    assert by_node[0] / 2 < by_node[1] < by_node[0]


def test_a_wire_of_blocks_needs_equal_cuts() -> None:
    blocks = case(one_rank_per_node(8), wire="int8")
    kept, left_out = schedules_of(blocks)
    assert "ring" in kept
    assert any("halving" in some.schedules and "encodes blocks" in some.reason for some in left_out)
    with pytest.raises(UsageError, match="halving: the wire 'int8' encodes blocks"):
        schedules_of(blocks, ["halving"])
    assert all(choose_auto(blocks, nbytes) in kept for nbytes in (64, 4096, BYTES, 1 << 26))


def test_auto_is_that_of_the_table() -> None:
    unknown = CollectiveCase("allreduce", one_rank_per_node(8), read_table())
    assert unknown.table.network == DEFAULT
    assert choose_auto(unknown, BYTES) == "ring"
    assert choose_auto(unknown, 64) == read_table().choose("allreduce", unknown.placement, 64).algorithm
    assert choose_auto(replace(unknown, wire="float32"), 64) == choose_auto(unknown, 64) == "library", "not encoded"
    assert choose_auto(replace(unknown, wire="float16"), 64) != "library"


@given(
    name=st.sampled_from(names()),
    collective=st.sampled_from(COLLECTIVES),
    shape=st.sampled_from([(1, 3, 1), (2, 4, 1), (2, 2, 2)]),
    nbytes=st.sampled_from([4, 4096, 84_000, BYTES]),
    wire=st.sampled_from([None, "bfloat16"]),
)
def test_no_simulation_beats_the_bound(
    name: str, collective: str, shape: tuple[int, int, int], nbytes: int, wire: str | None
) -> None:
    if collective in ("broadcast", "all_to_all"):
        wire = None
    here = case(regular(*shape), collective, wire)
    if name not in schedules_of(here)[0]:
        return
    done = simulate_schedule(here, name, nbytes)
    even_bytes = nbytes - nbytes % (4 * 48)  # shorter payloads are in chunks of unequal length, some of them empty
    assert done.seconds == max(done.ends)
    assert done.seconds >= here.bound(even_bytes) * (1 - 1e-6)


@pytest.mark.parametrize("name", ["ring", "direct", "halving"])
@pytest.mark.parametrize("collective", ["allreduce", "all_to_all"])
def test_price_is_near_the_simulation_where_all_ranks_do_the_same(name: str, collective: str) -> None:
    here = CollectiveCase(collective, one_rank_per_node(8), ScheduleTable({}, shaped(200e6)))
    if name not in schedules_of(here)[0]:
        return
    done = simulate_schedule(here, name, BYTES)
    assert done.seconds == pytest.approx(price_schedule(here, name, [BYTES])[0].seconds, rel=0.1)
    assert done.exact


def test_the_bottleneck_in_a_sentence() -> None:
    done = simulate_schedule(case(one_rank_per_node(4)), "ring", BYTES, Uneven({1: 50}, {2: 0.001}))
    assert done.delays[0].cause is Cause.LINK
    assert done.bottleneck.startswith(f"rank {done.ends.index(done.seconds)} ends last, its time is 9")
    assert "% bytes on links (" in done.bottleneck
    assert "node 1" in done.bottleneck


def test_very_many_ranks_are_left_to_the_price() -> None:
    with pytest.raises(NetworkError, match="4,096 ranks are too many to simulate; the limit is 2,048: `unisono price`"):
        simulate_schedule(case(one_rank_per_node(4096)), "halving", BYTES)


MACHINE = MachineFacts("example", link=LinkFacts(1e9, latency=1e-5))


def test_the_worked_example_of_an_exchange() -> None:
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
    costs = [exchange_cost(machine, 4, 1).cost.per_byte for machine in (MACHINE, known)]
    assert costs[0] < costs[1]


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_a_wire_does_not_shorten_sums_of_an_exchange(wire: str | None) -> None:
    known = replace(MACHINE, node=NodeFacts(memory_bandwidth=1e9))
    summed = 3 / 4 * 3e-9  # three quarters of a byte on each of 4 ranks, 3 bytes of memory each
    assert summed <= exchange_cost(known, 4, 1, wire, algorithm="ring").cost.per_byte <= summed + 1.5e-9


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
    for wire, algorithm in (("bfloat16", "auto"), ("exact", "auto"), (None, "library"), (None, "direct")):
        assert exchange_cost(known, 1, 4, wire, algorithm=algorithm).cost == exchange_cost(known, 1, 4).cost
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
    unsharded = exchange_cost(MACHINE, 4, 1).cost.seconds(8 << 20)
    assert exchange_cost(MACHINE, 4, 1, sharded=True).cost.seconds(8 << 20) == pytest.approx(unsharded, rel=0.01)
    narrow = exchange_cost(MACHINE, 4, 1, "bfloat16", sharded=True).cost.seconds(8 << 20)
    assert narrow == pytest.approx(0.75 * unsharded, rel=0.01)
    rows = [
        row(4, 1 << 20, seconds, collective=collective, wire=wire)
        for collective, wire, seconds in (("reduce_scatter", "bfloat16", 1.0), ("all_gather", "float32", 2.0))
    ]
    costs = [
        exchange_cost(replace(MACHINE, collectives=tuple(some)), 4, 1, "bfloat16", True) for some in (rows, rows[:1])
    ]
    assert costs[0].cost.seconds(1 << 20) == pytest.approx(3.0)
    assert [cost.basis for cost in costs] == ["measured", "estimated"]


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
        schedule, cost, cost_basis = exchange_cost(known, nodes, 1)
        assert (schedule, cost_basis) == ("ring", basis)
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
    assert exchange_cost(machine, 128, 1, "bfloat16").schedule == "halving"
    assert exchange_cost(machine, 128, 1, wire) == exchange_cost(machine, 128, 1, wire, algorithm="direct")
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
    assert nearest_rows([row_on(2, 7)], "allreduce", 1.0, 2, 6) == [], "3 and 4 ranks on a node"


def test_bytes_on_the_wire_come_before_nodes_and_these_before_ranks_of_a_node() -> None:
    near, far, dense = row_on(4, 4, "bfloat16"), row_on(2, 2), row_on(4, 8)
    assert nearest_rows([near, far], "allreduce", 1.0, 4, 4) == [far]
    assert nearest_rows([far, dense], "allreduce", 1.0, 4, 4) == [dense]
    assert nearest_rows([dense, row_on(4, 4)], "allreduce", 1.0, 4, 4) == [row_on(4, 4)]
    assert nearest_rows([row_on(8, 8), row_on(2, 2)], "allreduce", 1.0, 4, 4) == [row_on(2, 2)]
    assert nearest_rows([row_on(2, 2)], "all_gather", 1.0, 4, 4) == []
