"""Unequal links and late ranks in a simulation; `test_simulate` has what is equal everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.network import Network, Uneven, shaped, simulate
from unisono.network.traffic import fair_rates
from unisono.placement import one_rank_per_node, regular
from unisono.schedules import find, names
from unisono.schedules.ring import ring
from unisono.schedules.schedule import Program, receive, send

ALPHA, BETA = 1e-3, 1e-6
NETWORK = Network(ALPHA, BETA)
BYTES = 80_000
LATE = 0.5


def two_pairs(rank: int, _: int) -> Program:
    """Rank 0 sends to rank 1, rank 2 to rank 3."""
    return Program(1, (((receive(rank - 1, 0) if rank % 2 else send(rank + 1, 0),),),))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_link_scales_what_goes_through_it(slow: int) -> None:
    done = simulate(two_pairs, one_rank_per_node(4), NETWORK, BYTES, uneven=Uneven({slow: 4}))
    assert done.ends[:2] == pytest.approx([ALPHA + 4 * BYTES * BETA] * 2)
    assert done.ends[2:] == pytest.approx([ALPHA + BYTES * BETA] * 2)


def test_a_slow_link_paces_a_whole_ring() -> None:
    done = simulate(ring, one_rank_per_node(4), Network(0, BETA), BYTES, uneven=Uneven({2: 3}))
    assert done.seconds == pytest.approx(3 * 6 / 4 * BYTES * BETA, rel=0.2)
    assert done.seconds > 2 * 6 / 4 * BYTES * BETA


def test_within_a_node_no_link_is_slow() -> None:
    inside = Network(ALPHA, BETA, within_alpha=ALPHA, within_beta=BETA)
    even = simulate(two_pairs, regular(1, 2, 2), inside, BYTES)
    assert simulate(two_pairs, regular(1, 2, 2), inside, BYTES, uneven=Uneven({0: 9})) == even


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_delays_exactly_those_that_depend_on_it(late: int) -> None:
    even = simulate(two_pairs, one_rank_per_node(4), NETWORK, BYTES, eager=0)
    done = simulate(two_pairs, one_rank_per_node(4), NETWORK, BYTES, eager=0, uneven=Uneven({}, {late: LATE}))
    assert done.ends[:2] == pytest.approx([end + LATE for end in even.ends[:2]])
    assert done.ends[2:] == even.ends[2:]


def test_a_short_message_does_not_wait_for_a_late_receiver() -> None:
    done = simulate(two_pairs, one_rank_per_node(4), NETWORK, BYTES, eager=BYTES, uneven=Uneven({}, {1: LATE}))
    assert done.ends == pytest.approx([ALPHA + BYTES * BETA, LATE, *[ALPHA + BYTES * BETA] * 2])


def test_a_rank_without_rounds_ends_when_it_enters() -> None:
    done = simulate(ring, one_rank_per_node(1), NETWORK, BYTES, uneven=Uneven({}, {0: LATE}))
    assert done.ends == (LATE,)


@given(
    name=st.sampled_from(names()),
    shape=st.sampled_from([(1, 3, 1), (2, 3, 1), (2, 2, 2), (1, 2, 3)]),
    in_flight=st.integers(1, 4),
)
def test_if_all_are_late_all_end_later(name: str, shape: tuple[int, int, int], in_flight: int) -> None:
    placement, network = regular(*shape), shaped(10e6, shape[1], 3)
    algorithm = find(name, placement).allreduce
    even = simulate(algorithm, placement, network, 50_000, 1 << 12, in_flight)
    late = Uneven({}, dict.fromkeys(range(placement.ranks), LATE))
    done = simulate(algorithm, placement, network, 50_000, 1 << 12, in_flight, uneven=late)
    assert done.ends == pytest.approx([end + LATE for end in even.ends])
    assert even.seconds == max(even.ends)


def test_coarse_time_does_not_add_up_along_a_chain() -> None:
    placement = one_rank_per_node(64)
    algorithm = find("pipeline", placement).allreduce
    network = shaped(10e9)
    exact = simulate(algorithm, placement, network, 1 << 22, 1 << 16)
    coarse = simulate(algorithm, placement, network, 1 << 22, 1 << 16, max_exact_flows=0)
    assert exact.exact
    assert not coarse.exact
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.2)


LINKS = 6
UNLIMITED = LINKS

routes = st.lists(
    st.tuples(st.integers(0, LINKS - 1), st.integers(0, LINKS), st.integers(0, LINKS)).map(
        lambda route: route if len({*route}) == 3 else (route[0], UNLIMITED, UNLIMITED)
    ),
    min_size=1,
    max_size=30,
)
limits = st.lists(st.integers(1, 100), min_size=LINKS, max_size=LINKS)


@given(routes, limits)
def test_rates_are_max_min_fair(routes: list[tuple[int, ...]], limits: list[int]) -> None:
    capacities = np.array([*limits, np.inf], float)
    rates = fair_rates(np.array(routes), capacities)
    users = [[flow for flow, route in enumerate(routes) if link in route] for link in range(LINKS)]
    carried = np.array([rates[flows].sum() for flows in users])
    assert (carried <= capacities[:LINKS] * (1 + 1e-9)).all()
    for flow, route in enumerate(routes):
        assert any(
            carried[link] >= capacities[link] * (1 - 1e-9) and rates[flow] >= rates[users[link]].max() * (1 - 1e-9)
            for link in route
            if link != UNLIMITED
        )


def test_unused_share_goes_to_other_flows() -> None:
    assert fair_rates(np.array([(0, 2), (0, 1), (1, 2)]), np.array([1.0, 5.0, np.inf])).tolist() == [0.5, 0.5, 4.5]
