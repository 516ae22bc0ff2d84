"""Groups of messages, beside messages one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network import Simulated, Uneven, shaped, simulate
from unisono.network.flows import GroupedFlows, fair_rates
from unisono.network.traffic import Numbers
from unisono.placement import regular
from unisono.schedules import find, names

SHAPES = [(1, 5, 1), (2, 3, 1), (2, 8, 1), (4, 4, 1), (3, 4, 1), (2, 2, 2), (2, 2, 3)]


class OneByOne(GroupedFlows):
    """Messages each in a group of its own."""

    def _kinds(self, messages: Numbers) -> Numbers:
        return np.arange(len(messages))


def simulated(name: str, shape: tuple[int, int, int], nbytes: int, uneven: Uneven, eager: int) -> Simulated:
    placement, network = regular(*shape), shaped(10e6, shape[1], 3)
    return simulate(find(name, placement).allreduce, placement, network, nbytes, 1 << 12, 4, eager, uneven=uneven)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(names()),
    shape=st.sampled_from(SHAPES),
    nbytes=st.sampled_from([60, 20_000, 100_000]),
    slow=st.dictionaries(st.integers(0, 3), st.sampled_from([1.5, 4.0]), max_size=2),
    late=st.dictionaries(st.integers(0, 4), st.sampled_from([0.001, 0.1]), max_size=2),
    eager=st.sampled_from([0, 1 << 11]),
)
def test_groups_end_when_their_messages_do(
    name: str, shape: tuple[int, int, int], nbytes: int, slow: dict[int, float], late: dict[int, float], eager: int
) -> None:
    uneven = Uneven({node: times for node, times in slow.items() if node < shape[0] * shape[1]}, late)
    found = simulated(name, shape, nbytes, uneven, eager)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unisono.network.play.GroupedFlows", OneByOne)
        expected = simulated(name, shape, nbytes, uneven, eager)
    assert found.ends == pytest.approx(expected.ends, rel=1e-6)
    assert (found.messages, found.node_bytes) == (expected.messages, expected.node_bytes)


def test_a_round_of_equal_ranks_is_a_few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    start = GroupedFlows.start

    def counted(flows: GroupedFlows, messages: Numbers) -> None:
        nonlocal most
        start(flows, messages)
        most = max(most, len(flows.counts))

    monkeypatch.setattr(GroupedFlows, "start", counted)
    simulated("halving", (4, 16, 1), 1 << 16, Uneven(), 0)
    assert most == 4, "64 messages between 4 supernodes and 4 others, or inside 4"


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


def alone(routes: list[tuple[int, ...]], capacities: np.ndarray) -> np.ndarray:
    """Rates of flows by themselves, without limits of their own."""
    ones, none = np.ones(len(routes), np.int64), np.full(len(routes), np.inf)
    return fair_rates(np.array(routes), capacities, ones, none)


@settings(deadline=None)
@given(routes, limits)
def test_rates_are_max_min_fair(routes: list[tuple[int, ...]], limits: list[int]) -> None:
    capacities = np.array([*limits, np.inf], float)
    rates = alone(routes, capacities)
    users = [[flow for flow, route in enumerate(routes) if link in route] for link in range(LINKS)]
    carried = np.array([rates[flows].sum() for flows in users])
    assert (carried <= capacities[:LINKS] * (1 + 1e-9)).all()
    for flow, route in enumerate(routes):
        assert any(
            carried[link] >= capacities[link] * (1 - 1e-9) and rates[flow] >= rates[users[link]].max() * (1 - 1e-9)
            for link in route
            if link != UNLIMITED
        )


@settings(deadline=None)
@given(routes, limits, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), min_size=30, max_size=30))
def test_groups_have_the_rates_of_their_flows(
    routes: list[tuple[int, ...]], limits: list[int], groups: list[tuple[int, int]]
) -> None:
    counts, own = (np.array(numbers[: len(routes)]) for numbers in zip(*groups, strict=True))
    capacities = np.array([*limits, np.inf], float)
    rates = fair_rates(np.array(routes), capacities, counts, own.astype(float))
    of = np.repeat(np.arange(len(routes)), counts)
    private = np.arange(len(of)) + LINKS + 1  # each flow's limit as a link of its own
    written_out = [(*routes[group], link) for group, link in zip(of, private, strict=True)]
    expected = alone(written_out, np.array([*capacities, *own[of]]))
    np.testing.assert_allclose(rates[of], expected, rtol=1e-9)


def test_unused_share_goes_to_other_flows() -> None:
    assert alone([(0, 2), (0, 1), (1, 2)], np.array([1.0, 5.0, np.inf])).tolist() == [0.5, 0.5, 4.5]
