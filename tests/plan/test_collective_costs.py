from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.network import DEFAULT, NetworkError, Uneven, price, shaped
from unisono.network.choice import COLLECTIVES, ScheduleTable, read_table
from unisono.network.simulate import Cause
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.plan.collective_costs import (
    CollectiveCase,
    choose_auto,
    price_schedule,
    schedules_of,
    simulate_schedule,
)
from unisono.schedules import find, names

BYTES = 1 << 20


def case(placement: Placement, collective: str = "allreduce", wire: str | None = None) -> CollectiveCase:
    return CollectiveCase(collective, placement, ScheduleTable({}, shaped(10e9, 4, 2)), wire)


def test_the_worked_example() -> None:
    plain = CollectiveCase("allreduce", one_rank_per_node(4), ScheduleTable({}, shaped(10e9)), "bfloat16")
    (found,) = price_schedule(plain, "ring", [1_000_000])
    assert (found.rounds, found.sent_bytes) == (6, 750_000)
    assert plain.bound(1_000_000) == pytest.approx(0.6e-3)
    sums = 750_000 * float(plain.table.network.gamma)
    assert found.seconds == pytest.approx(0.6e-3 + 6 * float(plain.table.network.alpha) + sums)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_schedules_of_the_collective_are_priced_or_left_out(collective: str) -> None:
    one, several = case(one_rank_per_node(8), collective), case(regular(2, 4, 2), collective)
    offered = {name for name in names() if getattr(find(name, several.placement), collective) is not None}
    for each in (one, several):
        kept, left_out = schedules_of(each)
        assert set(kept) | {name for some in left_out for name in some.schedules} == offered
    assert schedules_of(several) == ([name for name in names() if name in offered], [])
    assert not any("/round" in name or name.startswith(("hier", "leader")) for name in schedules_of(one)[0])


def test_chosen_schedules_are_kept() -> None:
    assert schedules_of(case(one_rank_per_node(8)), ["leader", "ring"]) == (["leader", "ring"], [])


@pytest.mark.parametrize("name", ["ring", "halving", "direct"])
def test_sizes_have_the_price_of_the_schedule(name: str) -> None:
    here = case(regular(2, 4, 1))
    algorithm = find(name, here.placement).allreduce
    found = [row.seconds for row in price_schedule(here, name, [4096, BYTES])]
    assert found == [float(price(algorithm, here.placement, here.table.network, n)) for n in (4096, BYTES)]


def test_long_programs_are_examined_on_fewer_ranks() -> None:
    many = CollectiveCase("allreduce", one_rank_per_node(1024), ScheduleTable({}, shaped(10e9)))
    (found,) = price_schedule(many, "ring", [BYTES])
    assert found.seconds == pytest.approx(
        float(price(many.algorithm("ring"), many.placement, shaped(10e9), BYTES, [0]))
    )


def test_a_wire_halves_the_bytes_on_links_but_not_the_sums_nor_those_within_nodes() -> None:
    plain, narrow = (case(regular(2, 2, 2), wire=wire) for wire in (None, "bfloat16"))
    assert narrow.bound(BYTES) == pytest.approx(plain.bound(BYTES) / 2)
    assert narrow.network().gamma == plain.network().gamma
    assert narrow.network(by_node=True).within_beta == plain.network().within_beta
    sent = [price_schedule(one, "ring", [BYTES])[0].sent_bytes for one in (plain, narrow)]
    assert sent[1] == sent[0] / 2
    by_node = [price_schedule(one, "hierarchical", [BYTES])[0].sent_bytes for one in (plain, narrow)]
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
    whole = nbytes - nbytes % (4 * 48)  # shorter payloads are in chunks of unequal length, some of them empty
    assert done.seconds == max(done.ends)
    assert done.seconds >= here.bound(whole) * (1 - 1e-6)


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
