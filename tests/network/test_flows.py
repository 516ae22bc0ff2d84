"""Rates of flows are max-min fair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.network.flows import fair_rates

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


@settings(deadline=None)
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
