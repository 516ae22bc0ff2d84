import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.choosing.schedule_table import COLLECTIVES, ScheduleTable
from unisono.network import NetworkError, Uneven, shaped
from unisono.network.critical_path import Cause
from unisono.placement import Placement, one_rank_per_node, regular
from unisono.plan.collective_costs import CollectiveCase, price_schedule, schedules_of
from unisono.plan.simulated_schedule import simulate_schedule
from unisono.schedules import names

BYTES = 1 << 20


def case(placement: Placement, collective: str = "allreduce", wire: str | None = None) -> CollectiveCase:
    return CollectiveCase(collective, placement, ScheduleTable({}, shaped(10e9, 4, 2)), wire)


@settings(max_examples=60)
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
